"""Runs a launched call on one rank.

``python -m lightning_axosparse.strategy.launcher.worker FOLDER``
"""

from __future__ import annotations

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
from lightning_axosparse.strategy.launcher.call import (
    Call,
    CallFolder,
    CallResult,
    Failure,
    ProcessState,
    note_checkpoints_in,
)
from lightning_axosparse.strategy.launcher.changes import ReturnsShard, Snapshot, returned_by, write
from lightning_axosparse.strategy.launcher.pickling import load, save
from lightning_axosparse.strategy.launcher.stub import end_with_parent
from lightning_axosparse.support.files import keep_sockets_in


def main(path: str, parent: str = "0") -> None:
    """Run the call of a folder as the rank that MPI says this process is.

    ``parent`` is the process that mpiexec has started it from, if that is not its own parent.
    """
    folder = CallFolder(Path(path))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write whole lines, as on a terminal, so that the lines of ranks do not mix. That is not
        # the default in a pipe, nor where Python runs unbuffered.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    _end_with_caller(folder)
    keep_sockets_in(folder.path)
    world = world_communicator()
    this_rank().rank = world.rank
    call: Call | None = None
    # From here on the others wait for a rank that ends in another way than by `Abort`.
    try:
        from lightning_axosparse.distributed.mpi import watchdog

        unlink_segments(world)
        # Until the strategy sets its rank, every process would be rank zero for Lightning.
        vars(rank_zero_only).update(rank=world.rank)
        publish(world.rank, folder.status(world.rank), int(parent))
        if world.rank == 0:
            note_checkpoints_in(folder.checkpoints)
        watchdog.before_abort.append(partial(_report, folder))
        # In place of this module, whose names the caller's may have, too.
        sys.modules["__main__"] = ModuleType("__main__")
        call = cast(Call, load(folder.call))
        check_connected()
        call.state.restore()
        call.main.restore()
        _run(call, folder, world.rank)
        mark_finished()
    except BaseException as exception:
        try:
            sys.stdout.flush()
            _report(folder, cause_of(exception))
            if call is not None and call.trainer is not None:
                save_together(call.trainer, exception)
        except Exception:
            traceback.print_exc()
        finally:
            world.Abort(1)


def _end_with_caller(folder: CallFolder) -> None:
    """Kill this process and its children as soon as the caller, or mpiexec, has ended."""
    threading.Thread(target=_kill_after_caller, args=[folder], daemon=True).start()
    if sys.platform == "linux":
        end_with_parent()


def _kill_after_caller(folder: CallFolder) -> None:
    folder.wait_for_end_of_caller()
    shutil.rmtree(folder.path, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _report(folder: CallFolder, exception: BaseException) -> None:
    folder.write_failure(this_rank().rank, Failure.of(exception, this_rank().name))
    mark_finished()


def _run(call: Call, folder: CallFolder, rank: int) -> None:
    """Call the function and write this rank's weights; on rank 0 also its result and changes."""
    snapshot = Snapshot(call.known_objects) if rank == 0 else None
    strategy: Any = None if call.trainer is None else call.trainer.strategy
    if isinstance(strategy, ReturnsShard):
        strategy.keep_sharded()
    function = partial(call.function, *call.args, **call.kwargs)
    value = function() if call.trainer is None else run_until_tuned(call.trainer, function)
    if strategy is not None:
        write(returned_by(strategy, rank), folder.weights(rank))
    if snapshot is not None:
        changes = None if call.trainer is None else snapshot.changes()
        save(
            CallResult(value, changes, ProcessState.of_this_process()),
            folder.result,
            snapshot.known,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
