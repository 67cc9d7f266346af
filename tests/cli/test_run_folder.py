"""A folder that cannot be made ends a command with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_axosparse.cli.run_folder import RunFolder
from tests.ranks import PATIENCE


def test_the_folder_is_made(tmp_path: Path) -> None:
    callback = RunFolder()
    config = {"run": {"dir": f"{tmp_path}/a/b"}, "sweep": {"dir": f"{tmp_path}/c"}}
    callback.on_run_start(OmegaConf.create({"hydra": config}))
    callback.on_multirun_start(OmegaConf.create({"hydra": config}))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("train", "hydra.run.dir"),
        ("evaluate", "hydra.run.dir"),
        ("train -m", "hydra.sweep.dir"),
    ],
)
def test_a_command_says_which_folder_it_cannot_make(
    command: str, folder: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    module, *flags = command.split()
    start = [sys.executable, "-m", f"lightning_axosparse.cli.{module}", *flags]
    done = subprocess.run(
        [*start, f"{folder}={tmp_path}/file/nope", "seed=0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{folder}={tmp_path}/file/nope cannot be made: Not a directory.")
    assert "Traceback" not in done.stderr
