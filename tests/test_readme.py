"""The Python blocks of the README and of the docs run, and print what they say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.ranks import PATIENCE, warm_python

ROOT = Path(__file__).parents[1]
BLOCKS = {
    f"{page.name} {number}": block
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}
MY_PROJECT = """
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.examples.data import TextDataModule

def MyModule():
    return GPT(width=32, depth=3, heads=2, context=16)

def MyData():
    return TextDataModule(context=16, batch_size=16, max_bytes=2_000, max_held_out=8)
"""


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, tmp_path: Path) -> None:
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "train.py").write_text(BLOCKS[name])
    done = subprocess.run(
        [*warm_python(), "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for promised in re.findall(r"# (torch\.Size\(\[[\d, ]+\]\))", BLOCKS[name]):
        assert promised in done.stdout
