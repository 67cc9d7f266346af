"""Ranks that wait long for a good reason go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.faults import jobs
from tests.ranks import PATIENCE, REPOSITORY, warm_python


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watchdog act on what takes longer than a second, as all delays here do."""
    monkeypatch.setenv("AXOSPARSE_NOTICE_SECONDS", "1")


def test_a_slow_batch_a_compiler_a_pause_and_a_slow_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saves = ModelCheckpoint(tmp_path)
    io = jobs.SlowWriting()
    run = jobs.train(jobs.Delays(), g_inter=1, callbacks=[saves], checkpoint_io=io)
    assert run.global_step == 8
    waits = capfd.readouterr().err
    for index in range(3):
        waited = rf"rank 0 .* training batch {index} of epoch 0.*; waits for .*, for \d s now"
        assert re.search(waited, waits), waits


def test_a_breakpoint() -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    job = subprocess.Popen(
        [mpiexec, "-n", "2", *warm_python(), "-m", "tests.faults.jobs", "Debugged", "0"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdin is not None
    assert job.stdout is not None
    for line in job.stdout:
        if 'print("goes on")' in line:
            break
    time.sleep(jobs.Delays.seconds)
    rest, _ = job.communicate("continue\n", timeout=PATIENCE)
    assert job.returncode == 0, rest
    assert "goes on" in rest
