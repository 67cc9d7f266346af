from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.ranks import PATIENCE

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def named_files(notebook: nbformat.NotebookNode) -> list[str]:
    """The files that the text names as ones of a folder."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.findall(r"`([\w.-]+/[\w./-]+\.\w+)`", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:  # long enough for a sample that reads, but not for a test
        cell.source = cell.source.replace("limit_train_batches=200", "limit_train_batches=20")
    client = NotebookClient(
        notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    for name in named_files(notebook):
        assert (tmp_path / name).exists(), name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_with_the_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr"  # progress bars, and warnings of one machine
        assert "site-packages" not in str(output)
        assert "\\x1b" not in str(output)  # colours, which a page shows as characters
    assert path.stat().st_size < 500_000
