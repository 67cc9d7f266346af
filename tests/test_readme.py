"""The README's Python blocks do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import PATIENCE

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
MY_PROJECT = """
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.examples.text import TextDataModule

def MyModule():
    return GPT(width=32, depth=3, heads=2, context=16)

def MyData():
    return TextDataModule(context=16, batch_size=16, max_bytes=6_000, max_held_out=8)
"""


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number: int, tmp_path: Path) -> None:
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "train.py").write_text(BLOCKS[number])
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for promised in re.findall(r"# (torch\.Size\(\[[\d, ]+\]\))", BLOCKS[number]):
        assert promised in done.stdout


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 4
