"""Corrupt files: the one error for a file that does not hold what was written to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


class CorruptFileError(ValueError):
    """A file does not hold what was written to it: it was cut short or changed since.

    It is raised before a module or an optimizer has changed.
    """


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """Name ``path`` in what is raised by reading it.

    Args:
        path: the file that is read inside.

    Raises:
        CorruptFileError: for every exception; what readers raise depends on the file's bytes.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise CorruptFileError(
            f"'{path}' cannot be read: it is damaged, not whole, or a file of another kind "
            f"({error}). Nothing was loaded. Copy it again from where it was written, or take an "
            "earlier one."
        ) from error
