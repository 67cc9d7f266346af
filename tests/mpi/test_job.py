"""The folders of jobs, and what is left of jobs that were killed with all their processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_axosparse.mpi.environment import placement
from lightning_axosparse.mpi.job import JobFolder, remove_orphans
from lightning_axosparse.mpi.launcher import MPILauncher

FORK = multiprocessing.get_context("fork")  # This process has imported everything already.


def hold(folder: Path, connection: Any) -> None:
    tempfile.tempdir = str(folder)
    with JobFolder.temporary() as job:
        connection.send(job.path)
        connection.recv()


def test_a_start_removes_the_folders_of_dead_callers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "axosparse-of-another-program").mkdir()
    callers, folders = [], []
    for _ in range(2):
        ours, theirs = FORK.Pipe()
        callers.append(FORK.Process(target=hold, args=[tmp_path, theirs], daemon=True))
        callers[-1].start()
        folders.append(ours.recv())
    os.kill(callers[0].pid, signal.SIGKILL)
    callers[0].join()
    assert all(folder.exists() for folder in folders)
    with JobFolder.temporary() as first, JobFolder.temporary() as second:
        others = {folders[1], tmp_path / "axosparse-of-another-program"}
        assert set(tmp_path.iterdir()) == {first.path, second.path} | others
        child = FORK.Process(target=remove_orphans, args=[tmp_path])
        child.start()
        child.join()
        assert set(tmp_path.iterdir()) == {first.path, second.path} | others
    assert set(tmp_path.iterdir()) == others
    callers[1].kill()


def tell_what_is_mapped(folder: Path) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line]
    partial = folder / f"partial-{placement().rank}"
    partial.write_text("\n".join([str(os.getpid()), *mapped]))
    partial.rename(folder / f"rank-{placement().rank}")
    time.sleep(60)


def launch(folder: Path) -> None:
    tempfile.tempdir = str(folder / "tmp")
    MPILauncher(SingleDeviceStrategy("cpu"), 2).launch(tell_what_is_mapped, folder)


@pytest.mark.usefixtures("warm_ranks")
def test_a_job_killed_with_all_its_processes_leaves_nothing_for_long(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    caller = FORK.Process(target=launch, args=[tmp_path])
    caller.start()
    while len(told := list(tmp_path.glob("rank-*"))) < 2:
        assert caller.is_alive()
        time.sleep(0.05)
    pids, mapped = zip(*(file.read_text().split("\n", 1) for file in told), strict=True)
    ranks = [psutil.Process(int(pid)) for pid in pids]  # Warm ones are no children of mpiexec.
    mpiexec = psutil.Process(caller.pid).children(recursive=True)
    family = {psutil.Process(caller.pid), *mpiexec, *ranks}
    for kill in (psutil.Process.suspend, psutil.Process.kill):  # Nobody sees another die.
        for process in family:
            kill(process)
    caller.join()
    psutil.wait_procs(family, timeout=10)

    assert all("/dev/shm/mpich_shm_" in text for text in mapped), "MPICH names them otherwise"
    for line in "\n".join(mapped).splitlines():
        assert line.endswith("(deleted)")
        assert not Path(line.removesuffix(" (deleted)")).exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    with JobFolder.temporary() as folder:
        assert list((tmp_path / "tmp").iterdir()) == [folder.path]
