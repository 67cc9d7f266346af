"""Ranks that mpiexec has started: how a job ends whose rank is lost, or that receives SIGTERM."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.test_waits import BOUND
from tests.ranks import run_command


def run(job: str, rank: int, workers: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a job of ``tests.faults.jobs`` in which something goes wrong on one rank."""
    # Warm ranks would have other parents than the proxies of mpiexec.
    start = [Path(sys.executable).parent / "mpiexec", "-n", "2", sys.executable]
    command = [*start, "-m", "tests.faults.jobs", job, str(rank), str(workers)]
    return run_command(command, BOUND)


@pytest.mark.parametrize(
    ("job", "rank", "workers", "words"),  # Workers have the files of the rank.
    [
        ("Killed", 1, 1, r"rank 1 \(stage 0 of replica 0\) on host \S+ was killed by SIGKILL"),
        ("LeavesWell", 0, 0, r"rank 0 \(stage 1 of replica 0\) on host \S+ ended with exit code 0"),
    ],
)
def test_what_ends_a_job_is_named(job: str, rank: int, workers: int, words: str) -> None:
    done = run(job, rank, workers)
    assert done.returncode != 0
    assert re.search(rf"^\[axosparse\] {words}", done.stderr, re.MULTILINE), done.stderr
    # The first stage, of the last rank, begins with the code before the layers.
    place = ("micro-batch 0, forward pass", "before its first micro-batch")[rank]
    position = rf"rank {rank} .*in training batch 2 of epoch 0, {place}"
    assert re.search(position, done.stderr), done.stderr


def test_a_job_that_is_preempted_ends_before_it_is_killed() -> None:
    done = run("Preempted", 1)
    preempted = re.search(r"preempted at (\S+)", done.stdout)
    assert preempted, done.stderr
    # As a rule it takes three; Slurm kills after 30, and the others would wait for as long.
    assert time.time() - float(preempted[1]) < 15
    assert done.returncode != 0
    assert re.search(r"ank [01] .*received SIGTERM", done.stderr), done.stderr
    assert "unequal" not in done.stderr
