"""What a call takes along to its ranks, and what is left of calls whose processes were killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from lightning_axosparse.distributed.mpi.environment import placement
from lightning_axosparse.strategy.launcher import pickling
from lightning_axosparse.strategy.launcher.call import (
    origin_of_main,
    set_torch_flags,
    torch_flags,
)
from lightning_axosparse.strategy.launcher.launcher import MPILauncher
from lightning_axosparse.support.files import remove_orphans, temporary_folder

FORK = multiprocessing.get_context("fork")  # This process has imported everything already.


@pytest.mark.parametrize(
    ("main", "imported"),
    [
        ({"__file__": "/home/me/train.py"}, {"init_main_from_path": "/home/me/train.py"}),
        (
            {"__file__": "/home/me/pkg/train.py", "__spec__": ModuleSpec("pkg.train", None)},
            {"init_main_from_name": "pkg.train"},
        ),
        ({}, {}),
    ],
)
def test_processes_that_a_rank_spawns_import_the_module_of_the_caller(main, imported, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    vars(sys.modules["__main__"]).update(main)
    assert origin_of_main() == main
    preparation = spawn.get_preparation_data("a worker of a DataLoader")
    assert {k: v for k, v in preparation.items() if "init_main" in k} == imported


class Wrapping(nn.Module):
    """A module that cannot be made without arguments, such as an average of another one."""

    def __new__(cls, wrapped: nn.Module) -> Any:
        return super().__new__(cls)

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped


def test_a_module_with_a_constructor_of_its_own_is_copied(tmp_path):
    module = Wrapping(nn.Linear(4, 2))
    pickling.save(module, tmp_path / "module")
    copied = pickling.load(tmp_path / "module")
    torch.testing.assert_close(copied.wrapped.weight, module.wrapped.weight)


@pytest.mark.parametrize("parametrized", [weight_norm, spectral_norm, orthogonal])
def test_a_parametrized_module_is_copied(parametrized: Any, tmp_path: Path) -> None:
    module = nn.Sequential(parametrized(nn.Linear(4, 4)), nn.ReLU())
    pickling.save(module, tmp_path / "module")
    copied, inputs = pickling.load(tmp_path / "module"), torch.randn(3, 4)
    assert type(copied[0]).__name__ == "ParametrizedLinear"
    for each in (module.eval(), copied.eval()):
        each(inputs).sum().backward()
    assert torch.equal(copied(inputs), module(inputs))
    for one, other in zip(copied.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)


OTHER_FLAGS = {
    "backends.cuda.flash_sdp_enabled": False,
    "backends.cudnn.benchmark": True,
    "backends.cudnn.deterministic": True,
    "backends.mha.get_fastpath_enabled": False,
    "backends.mkldnn.enabled": False,
    "get_default_device": torch.device("meta"),
    "get_default_dtype": torch.float64,
    "get_deterministic_debug_mode": 1,
    "get_float32_matmul_precision": "high",
    "is_anomaly_enabled": True,
    "is_grad_enabled": False,
    "is_warn_always_enabled": True,
    "serialization.get_safe_globals": [*torch.serialization.get_safe_globals(), Path],
}


@pytest.fixture
def other_flags() -> Iterator[None]:
    """Flags as no process has them from its start on."""
    before, safe = torch_flags(), torch.serialization.get_safe_globals()
    set_torch_flags(OTHER_FLAGS)
    yield
    set_torch_flags(before)
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(safe)
    torch.set_default_device(None)
    after = torch_flags()
    for found in (before, after):
        found.pop("serialization.get_safe_globals")  # a list of a set
    assert after == before


def flags_then_float16() -> dict[str, Any]:
    found = torch_flags()
    torch.set_default_dtype(torch.float16)
    return found


@pytest.mark.usefixtures("other_flags")
def test_ranks_have_the_flags_of_the_caller_and_the_caller_those_of_ranks():
    here = torch_flags()
    for name, value in OTHER_FLAGS.items():
        if name != "serialization.get_safe_globals":
            assert here[name] == value, name
    assert Path in here["serialization.get_safe_globals"]
    there = MPILauncher(SingleDeviceStrategy("cpu"), 1).launch(flags_then_float16)
    for name, value in here.items():
        if name == "serialization.get_safe_globals":
            assert set(there[name]) == set(value)
        else:
            assert there[name] == value, name
    assert torch.get_default_dtype() == torch.float16


def test_flags_of_another_kind_than_those_that_are_read_are_left_out(monkeypatch):
    def refuse() -> str:
        raise RuntimeError("a mix of the legacy and the new API")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert "get_float32_matmul_precision" not in torch_flags()
    assert "get_default_dtype" in torch_flags()


def hold(folder: Path, connection: Any) -> None:
    tempfile.tempdir = str(folder)
    with temporary_folder() as call:
        connection.send(call)
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
    with temporary_folder() as first, temporary_folder() as second:
        others = {folders[1], tmp_path / "axosparse-of-another-program"}
        assert set(tmp_path.iterdir()) == {first, second} | others
        child = FORK.Process(target=remove_orphans, args=[tmp_path])
        child.start()
        child.join()
        assert set(tmp_path.iterdir()) == {first, second} | others
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
    with temporary_folder() as folder:
        assert list((tmp_path / "tmp").iterdir()) == [folder]
