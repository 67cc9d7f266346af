"""Worker: one rank of a launched call. ``python -m lightning_axosparse.mpi.worker FOLDER``."""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import cast

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_axosparse.grid import Grid
from lightning_axosparse.mpi.changes import Snapshot, known_objects
from lightning_axosparse.mpi.environment import describe_rank
from lightning_axosparse.mpi.job import Answer, Failure, Job, JobFolder, ProcessState
from lightning_axosparse.mpi.pickling import load, save
from lightning_axosparse.mpi.segments import unlink_segments
from lightning_axosparse.whereabouts import leave, publish

_PR_SET_PDEATHSIG = 1


def main(folder: JobFolder) -> None:
    """Run the job of ``folder`` as the rank that MPI says this process is."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on a terminal: lines of ranks do not mix, also where Python runs unbuffered.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    threading.Thread(target=_die_with_caller, args=[folder], daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from mpi4py import MPI

    from lightning_axosparse.mpi import watchdog

    world = MPI.COMM_WORLD
    unlink_segments(world)
    # Until the strategy says so, every process takes itself for rank zero and prints.
    vars(rank_zero_only).update(rank=world.rank)
    publish(world.rank, folder.whereabouts(world.rank))
    watchdog.told.append(partial(_leave_word, folder, world.rank))
    job: Job | None = None
    try:
        job = _read(folder)
        _check_world(world.size, job.ranks)
        job.state.restore()
        _run(job, folder, world.rank)
        leave()
    except BaseException as exception:
        sys.stdout.flush()
        where = describe_rank(world.rank, _grid(job))
        folder.write_failure(world.rank, Failure.of(exception, where))
        leave()
        world.Abort(1)


def _leave_word(folder: JobFolder, rank: int, error: BaseException) -> None:
    folder.write_failure(rank, Failure.of(error, describe_rank(rank)))
    leave()


def _read(folder: JobFolder) -> Job:
    return cast(Job, load(folder.job))


def _run(job: Job, folder: JobFolder, rank: int) -> None:
    if rank != 0:
        job.function(*job.args, **job.kwargs)
    elif job.trainer is None:
        result = job.function(*job.args, **job.kwargs)
        save(Answer(result, None, ProcessState.of_this_process()), folder.answer)
    else:
        arguments = (*job.args, *job.kwargs.values())
        snapshot = Snapshot(known_objects(job.trainer, arguments))
        result = job.function(*job.args, **job.kwargs)
        answer = Answer(result, snapshot.changes(), ProcessState.of_this_process())
        save(answer, folder.answer, snapshot.known)


def _check_world(found: int, asked: int) -> None:
    if found != asked:
        raise RuntimeError(
            f"mpiexec started {asked} processes, but MPI connects {found} of them: mpiexec and the "
            "MPI library that mpi4py loads belong to different installations. Put the mpiexec of "
            "that library first on PATH (`python -m mpi4py --mpi-library` shows the library)."
        )


def _grid(job: Job | None) -> Grid | None:
    strategy = job.trainer.strategy if job and job.trainer else None
    return getattr(strategy, "grid", None)


def _die_with_caller(folder: JobFolder) -> None:
    folder.wait_for_caller_to_go()
    shutil.rmtree(folder.path, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(JobFolder(Path(sys.argv[1])))
