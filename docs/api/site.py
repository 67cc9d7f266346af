"""Shows the docstrings on the pages of this folder: a hook of mkdocs.

In the repository these pages are lists that lead to the source, each with a comment for the site.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put what the comments say in the place of the lists and of what is said about them."""
    shown = re.findall(r"<!-- (:::.*?)-->", markdown, re.DOTALL)
    if not page.file.src_uri.startswith("api/"):
        return markdown
    return "\n\n".join([markdown.partition("\n")[0], *shown])


def on_page_content(html: str, **_: Any) -> str:
    """Leave out Sphinx's roles, which Markdown does not know."""
    return re.sub(r":(?:class|func|meth|attr|mod|exc):(?=<code>)", "", html)
