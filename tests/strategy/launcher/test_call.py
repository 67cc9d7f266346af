"""The folders of calls, and what is left of calls whose processes were all killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_axosparse.distributed.mpi.environment import placement
from lightning_axosparse.strategy.launcher.call import CallFolder, MainModule, ProcessState
from lightning_axosparse.strategy.launcher.launcher import MPILauncher
from lightning_axosparse.support.files import remove_orphans

FORK = multiprocessing.get_context("fork")  # This process has imported everything already.


@pytest.mark.parametrize(
    ("main", "imported"),
    [
        (MainModule("/home/me/train.py", None), {"init_main_from_path": "/home/me/train.py"}),
        (MainModule("/home/me/pkg/train.py", "pkg.train"), {"init_main_from_name": "pkg.train"}),
        (MainModule(None, None), {}),
    ],
)
def test_processes_that_a_rank_spawns_import_the_module_of_the_caller(main, imported, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    main.restore()
    assert MainModule.of_this_process() == main
    preparation = spawn.get_preparation_data("a worker of a DataLoader")
    assert {k: v for k, v in preparation.items() if "init_main" in k} == imported


def test_ranks_run_by_onednn_only_if_the_caller_does(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        of_caller = ProcessState.of_this_process()
    enabled, precision = torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()
    try:
        of_caller.restore()
        assert not torch.backends.mkldnn.enabled
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.backends.mkldnn.enabled = enabled


def hold(folder: Path, connection: Any) -> None:
    tempfile.tempdir = str(folder)
    with CallFolder.temporary() as call:
        connection.send(call.path)
        connection.recv()


def test_a_call_removes_the_folders_of_dead_callers_only(tmp_path, monkeypatch):
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
    with CallFolder.temporary() as first, CallFolder.temporary() as second:
        others = {folders[1], tmp_path / "axosparse-of-another-program"}
        assert set(tmp_path.iterdir()) == {first.path, second.path} | others
        child = FORK.Process(target=remove_orphans, args=[tmp_path])
        child.start()
        child.join()
        assert set(tmp_path.iterdir()) == {first.path, second.path} | others
    assert set(tmp_path.iterdir()) == others
    callers[1].kill()


def write_what_is_mapped(folder: Path) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line]
    partial = folder / f"partial-{placement().rank}"
    partial.write_text("\n".join([str(os.getpid()), *mapped]))
    partial.rename(folder / f"rank-{placement().rank}")
    time.sleep(60)


def launch(folder: Path) -> None:
    tempfile.tempdir = str(folder / "tmp")
    MPILauncher(SingleDeviceStrategy("cpu"), 2).launch(write_what_is_mapped, folder)


def test_the_next_call_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    caller = FORK.Process(target=launch, args=[tmp_path])
    caller.start()
    while len(written := list(tmp_path.glob("rank-*"))) < 2:
        assert caller.is_alive()
        time.sleep(0.05)
    pids, mapped = zip(*(file.read_text().split("\n", 1) for file in written), strict=True)
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
    with CallFolder.temporary() as folder:
        assert list((tmp_path / "tmp").iterdir()) == [folder.path]
