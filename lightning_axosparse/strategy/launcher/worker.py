"""Runs a launched call on one rank.

``python -m lightning_axosparse.strategy.launcher.worker FOLDER STUB PARENT``
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_axosparse.distributed.mpi.environment import check_connected, world_communicator
from lightning_axosparse.distributed.mpi.mpich import unlink_segments
from lightning_axosparse.distributed.rank_status import mark_finished, publish, this_rank
from lightning_axosparse.strategy.compat.callbacks import run_until_tuned
from lightning_axosparse.strategy.compat.lockstep import cause_of, save_together
from lightning_axosparse.strategy.launcher.call import Call, ProcessState
from lightning_axosparse.strategy.launcher.changes import Snapshot, write_tensors
from lightning_axosparse.strategy.launcher.failure import FailureReport
from lightning_axosparse.strategy.launcher.pickling import load, save
from lightning_axosparse.strategy.launcher.stub import signal_when_parent_ends
from lightning_axosparse.support.files import LOCK, put_sockets_in


def main(path: str, stub: str, parent: str) -> None:
    """Run the call of a folder as the rank that MPI says this process is.

    Args:
        path: of the folder.
        stub: the process ID of the stub that mpiexec has started for this rank.
        parent: the process ID of the stub's parent.
    """
    folder = Path(path)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write whole lines, so that the lines of ranks do not mix. That is the default only on a
        # terminal.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    threading.Thread(target=_end_with_caller, args=[folder], daemon=True).start()
    signal_when_parent_ends(signal.SIGKILL)
    put_sockets_in(folder)
    world = world_communicator()
    this_rank().rank = world.rank
    call: Call | None = None
    # From here on the others would wait for a rank that ends without `Abort`.
    try:
        from lightning_axosparse.distributed.mpi import watchdog

        unlink_segments(world)
        # Until the strategy sets its rank, Lightning treats every process as rank zero.
        vars(rank_zero_only).update(rank=world.rank)
        publish(world.rank, folder / f"status-{stub}", int(parent))
        watchdog.before_abort.append(partial(_report, folder, stub))
        # Replaces this module, whose names the caller's `__main__` may use, too.
        sys.modules["__main__"] = ModuleType("__main__")
        main = vars(sys.modules["__main__"])
        call = cast(Call, load(folder / "call", main=main))
        check_connected()
        call.state.restore()
        main.update(call.main)
        _run(call, folder, world.rank)
        mark_finished()
        (folder / f"done-{stub}").touch()
    except BaseException as exception:
        try:
            sys.stdout.flush()
            _report(folder, stub, cause_of(exception))
            if call is not None and call.trainer is not None:
                save_together(call.trainer, exception)
        except Exception:
            traceback.print_exc()
        finally:
            world.Abort(1)


def _end_with_caller(folder: Path) -> None:
    """Kill this process and its children when the caller has ended or unlocked the folder."""
    with (folder / LOCK).open() as lock:
        fcntl.lockf(lock, fcntl.LOCK_SH)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _report(folder: Path, stub: str, exception: BaseException) -> None:
    FailureReport.of(exception, this_rank().name).write(folder, stub)
    mark_finished()


def _run(call: Call, folder: Path, rank: int) -> None:
    """Call the function and write this rank's weights; on rank 0 also its result and changes."""
    snapshot = Snapshot(call.named_objects) if rank == 0 else None
    strategy: Any = None if call.trainer is None else call.trainer.strategy
    if strategy is not None:
        strategy.keep_sharded()
    function = partial(call.function, *call.args, **call.kwargs)
    value = function() if call.trainer is None else run_until_tuned(call.trainer, function)
    if strategy is not None:
        write_tensors(strategy.release_shard(), folder / f"weights-{rank}")
    if snapshot is not None:
        changes = None if call.trainer is None else snapshot.changes()
        result = value, changes, ProcessState.of_this_process()
        save(result, folder / "result", snapshot.named)


if __name__ == "__main__":
    main(*sys.argv[1:])
