"""Shows the notebooks, with the outputs that they are kept with, as pages of the site: a hook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        page = "\n\n".join(map(_cell, json.loads(notebook.read_text())["cells"]))
        # Links are right in the repository.
        page = page.replace("](../docs/", "](../")
        page = re.sub(r"\]\(\.\./benchmarks/(\w+)(/README\.md)?\)", r"](../benchmarks/\1.md)", page)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links from docs to those notebooks to the pages."""
    return re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb", r"](notebooks/\1.md", markdown)


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    shown = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in shown:
        return f"![output](data:image/png;base64,{''.join(shown['image/png']).strip()})"
    return f"```text\n{''.join(shown['text/plain']).rstrip()}\n```"
