"""Says at the end of a message which entry of the documentation explains it."""

from __future__ import annotations

from typing import Literal

PAGE = "docs/troubleshooting.md"

Entry = Literal[
    "grid",
    "starting-ranks",
    "layers",
    "steps",
    "values-between-layers",
    "losses",
    "batches",
    "optimizers",
    "callbacks",
    "tickets",
    "logging",
    "checkpoints",
    "copies",
    "data-of-the-examples",
]
"""The headings of the page, as in links to them."""


def see(entry: Entry) -> str:
    """Return the last sentence of a message."""
    return f" See {PAGE}#{entry}."
