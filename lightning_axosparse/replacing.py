"""Replacing: a file is written whole or not at all, and takes the place of an older one at the end.

A disk that is full, or a job that is killed, then leaves the older file as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path beside ``path`` to write to, which becomes ``path`` if nothing is raised.

    Args:
        path: the file to make, or to replace.
    """
    goal = Path(path)
    partial = goal.with_name(f".{goal.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(goal)
    finally:
        partial.unlink(missing_ok=True)
