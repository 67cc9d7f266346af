"""Tasks of a Slurm step that no process manager connects."""

from __future__ import annotations

import os

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.mpi import slurm

STEP = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", slurm.TASKS: "4"}


@pytest.fixture
def variables(monkeypatch, request):
    for name in list(os.environ):
        if name.startswith(("SLURM", *slurm.MANAGERS)):
            monkeypatch.delenv(name)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)


CASES = [
    ({}, 0),
    ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 0),  # a batch script
    ({**STEP, slurm.TASKS: "1"}, 0),
    (STEP, 4),
    ({**STEP, "PMI_RANK": "0", "PMI_FD": "11"}, 0),
    ({**STEP, "PMIX_RANK": "0"}, 0),
    ({**STEP, "I_MPI_PMI_LIBRARY": "libpmi.so"}, 0),
]


@pytest.mark.parametrize(("variables", "tasks"), CASES, indirect=["variables"])
def test_unmanaged_tasks_are_announced_with_the_line_that_works(variables, tasks, capsys):
    assert slurm.unmanaged_tasks() == tasks
    slurm.announce_unmanaged_tasks()
    said = capsys.readouterr().err
    assert bool(said) == bool(tasks)
    if tasks:
        assert "srun started 4 tasks" in said
        assert "`srun --mpi=pmi2 -K ...`" in said
        assert "`srun --mpi=list`" in said


@pytest.mark.parametrize("variables", [{**STEP, "SLURM_PROCID": "1"}], indirect=True)
def test_only_the_first_task_prints(variables, capsys):
    slurm.announce_unmanaged_tasks()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("variables", [STEP], indirect=True)
def test_the_strategy_raises(variables):
    with pytest.raises(MisconfigurationException, match="srun started 4 tasks, but MPI connects 1"):
        AxoSparseStrategy()
