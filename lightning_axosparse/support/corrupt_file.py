"""Defines the error for a file, or a state, whose content is not what was written to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from lightning_axosparse.support.troubleshooting import see, without_link


class CorruptFileError(ValueError):
    """The content of a file is not what was written to it: it was truncated or changed.

    It is raised before a module or an optimizer has changed.

    Args:
        reason: what was found, as part of a sentence.
        source: what was read; a file is named by :func:`reading`.
    """

    def __init__(self, reason: str, source: str = "The saved state") -> None:
        super().__init__(reason, source)
        self.reason = reason
        self.source = source

    def __str__(self) -> str:
        return (
            f"{self.source} cannot be read: it is damaged, not whole, or of another kind "
            f"({self.reason}). Nothing was loaded. Copy it again from where it was written, or "
            "take an earlier one." + see("files")
        )


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
        reason = error.reason if isinstance(error, CorruptFileError) else without_link(error)
        raise CorruptFileError(reason, f"'{path}'") from error


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Raise a :class:`CorruptFileError` where the context stumbles over what a checkpoint holds.

    Errors of other kinds say themselves what does not fit, such as a shape.

    Args:
        what: is restored in the context, in words.

    Raises:
        CorruptFileError: for a missing entry, or one of another type.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptFileError(reason, f"The state of {what} in the checkpoint") from error
