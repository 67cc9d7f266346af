"""Shows the READMEs of the benchmarks as pages of the site: a hook of mkdocs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each folder."""
    for readme in sorted(FOLDER.glob("*/README.md")):
        page = f"benchmarks/{readme.parent.name}.md"
        files.append(File.generated(config, page, content=readme.read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to those READMEs, from docs and from each other, to the pages."""
    return re.sub(r"\]\(\.\./(benchmarks/)?(\w+)/README\.md", r"](\1\2.md", markdown)
