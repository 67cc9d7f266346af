"""Defines the error for a file whose content is not what was written to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


class CorruptFileError(ValueError):
    """The content of a file is not what was written to it: it was truncated or changed.

    It is raised before a module or an optimizer has changed.
    """


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """Raise a :class:`CorruptFileError` that names ``path`` for any exception in the context.

    Which exceptions readers raise depends on the bytes of the file.

    Args:
        path: the file that is read in the context.

    Raises:
        CorruptFileError: for every exception except MemoryError.
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
