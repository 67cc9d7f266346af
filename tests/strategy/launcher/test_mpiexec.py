"""What ranks see of the process that starts them."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from lightning_axosparse.strategy.launcher import mpiexec
from lightning_axosparse.strategy.launcher.mpiexec import environment
from tests.ranks import REPOSITORY


def test_ranks_know_of_the_terminal_and_not_of_another_job(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        at_terminal = environment()
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        captured = environment()
    os.close(ours)
    assert at_terminal["TTY_COMPATIBLE"] == at_terminal["TTY_INTERACTIVE"] == "1"
    assert at_terminal["COLUMNS"] == "70"
    assert "TTY_COMPATIBLE" not in captured
    for variables in (at_terminal, captured):
        assert variables["OMP_WAIT_POLICY"] == "passive"
        assert not {"PMI_RANK", "SLURM_NTASKS"} & set(variables)
        assert variables["HYDRA_FULL_ERROR"] == "1"
        assert str(REPOSITORY) in variables["PYTHONPATH"].split(os.pathsep)


def test_what_ranks_print_while_they_are_stopped_is_copied(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    print('saved ' * 50_000)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGINT, save)\n"
        "print('begins', flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begins\n"
    shown = io.StringIO()
    mpiexec.stop(process, [mpiexec.Output(shown), mpiexec.Output(shown)], signal.SIGINT, tmp_path)
    assert process.returncode == 3
    assert shown.getvalue().count("saved") == 50_000
