"""Job size, placement, and whether ranks can be started."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.mpi import environment
from lightning_axosparse.distributed.mpi.environment import (
    MPIJobEnvironment,
    Placement,
    _library_found,
    abort_job,
    check_can_start,
    job_size,
    limited_threads,
    placement,
)
from lightning_axosparse.distributed.rank_status import this_rank
from tests.ranks import run_ranks

IN_A_BATCH_SCRIPT = {
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def plain_process(monkeypatch):
    """No variable of any launcher, and no way to start MPI."""
    for variable in list(os.environ):
        if variable.startswith(("PMI", "OMPI", "MPI", "MV2", "JSM", "SLURM")):
            monkeypatch.delenv(variable)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    placement.cache_clear()
    yield monkeypatch
    placement.cache_clear()


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, 1),
        (IN_A_BATCH_SCRIPT, 1),
        ({**IN_A_BATCH_SCRIPT, "SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 3),
        ({**IN_A_BATCH_SCRIPT, "PMI_SIZE": "2"}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, 2),
        # Open MPI's daemons are the tasks of a Slurm step; the ranks are theirs.
        ({"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8),
        ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2"}, 2),
    ],
)
def test_job_size_without_mpi(plain_process, variables, size):
    for name, value in variables.items():
        plain_process.setenv(name, value)
    assert job_size() == size
    assert MPIJobEnvironment.detect() == (size > 1)
    assert MPIJobEnvironment().creates_processes_externally == (size > 1)


def test_a_plain_process_is_one_rank_without_mpi(plain_process):
    here = pickle.loads(pickle.dumps(MPIJobEnvironment()))
    assert here.world_size() == 1
    assert here.global_rank() == here.local_rank() == here.node_rank() == 0
    assert here.main_address == "127.0.0.1"
    assert 0 < here.main_port < 1 << 16


def test_a_plain_process_has_no_job_to_abort(plain_process):
    abort_job(ValueError("boom"))


def find_placement() -> tuple[Placement, Any]:
    here = MPIJobEnvironment()
    assert here.world_size() == job_size() == 3
    assert here.global_rank() == here.local_rank() == placement().rank
    found = placement()
    placement.cache_clear()
    os.environ["PMI_SIZE"] = "7"
    try:
        placement()
    except MisconfigurationException as error:
        return found, str(error)
    return found, None


def test_placement_on_ranks():
    for rank, (here, error) in enumerate(run_ranks(3, find_placement)):
        assert here == Placement(rank, 3, rank, node_rank=0, nodes=1, main_address="127.0.0.1")
        assert "7 processes were started, but MPI connects 3" in error
        assert "srun --mpi" in error


def fail_on_rank_1() -> None:
    from mpi4py import MPI

    rank = placement().rank
    try:
        if rank == 1:
            raise ValueError("boom")
        MPI.COMM_WORLD.Barrier()
    except ValueError as error:
        this_rank().set_grid(Grid(world_size=2, g_inter=2, rank=rank))
        abort_job(error)


def test_abort_job_ends_all_ranks_and_says_why():
    with pytest.raises(AssertionError, match="ValueError: boom") as failure:
        run_ranks(2, fail_on_rank_1)
    assert "Failed on rank 1 (stage 0 of replica 0)" in str(failure.value)


def test_mpi_is_there():
    _library_found.cache_clear()
    check_can_start(2)


def test_missing_mpiexec_says_how_to_get_mpi(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    _library_found.cache_clear()
    with pytest.raises(MisconfigurationException, match=r"no `mpiexec`") as error:
        check_can_start(2)
    assert "pip install mpich" in str(error.value)


def test_missing_library_says_how_to_get_mpi(monkeypatch, tmp_path):
    for name, script in [("mpiexec", ""), ("python", "echo 'cannot load MPI' >&2; exit 1")]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    _library_found.cache_clear()
    with pytest.raises(MisconfigurationException, match="cannot load MPI") as error:
        check_can_start(2)
    assert "pip install mpich" in str(error.value)


def test_mpiexec_beside_python_comes_first(monkeypatch, tmp_path):
    beside, on_path = tmp_path / "venv", tmp_path / "bin"
    for folder in (beside, on_path):
        folder.mkdir()
        (folder / "mpiexec").write_text("#!/bin/sh\n")
        (folder / "mpiexec").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(on_path))
    assert environment.find_mpiexec() == str(beside / "mpiexec")
    (beside / "mpiexec").unlink()
    assert environment.find_mpiexec() == str(on_path / "mpiexec")


def test_threads_are_limited_unless_the_user_chose_and_come_back(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with limited_threads():
            assert torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS")
        with limited_threads():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_processes_of_torchrun_are_refused_with_the_lines_that_start_ranks(plain_process):
    plain_process.setenv("TORCHELASTIC_RUN_ID", "none")
    plain_process.setenv("WORLD_SIZE", "1")
    environment.check_connected()
    plain_process.setenv("WORLD_SIZE", "3")
    with pytest.raises(MisconfigurationException, match=r"`mpiexec -n 3 python train\.py`"):
        environment.check_connected()
    plain_process.setenv("PMI_SIZE", "2")
    assert job_size() == 2  # of ranks that such a process has started


STEP = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", environment._TASKS: "4"}


@pytest.fixture
def variables(monkeypatch, request):
    for name in list(os.environ):
        if name.startswith(("SLURM", *environment._MANAGERS)):
            monkeypatch.delenv(name)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)


CASES = [
    ({}, 0),
    ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 0),  # a batch script
    ({**STEP, environment._TASKS: "1"}, 0),
    (STEP, 4),
    ({**STEP, "PMI_RANK": "0", "PMI_FD": "11"}, 0),
    ({**STEP, "PMIX_RANK": "0"}, 0),
    ({**STEP, "I_MPI_PMI_LIBRARY": "libpmi.so"}, 0),
]


@pytest.mark.parametrize(("variables", "tasks"), CASES, indirect=["variables"])
def test_tasks_of_slurm_are_managed_or_not(variables, tasks):
    assert environment.unmanaged_tasks() == tasks


@pytest.mark.parametrize("variables", [STEP], indirect=True)
def test_the_strategy_raises(variables):
    with pytest.raises(
        MisconfigurationException,
        match=r"srun started 4 tasks, but MPI connects 1.*`srun --mpi=pmi2 -K",
    ):
        AxoSparseStrategy()
