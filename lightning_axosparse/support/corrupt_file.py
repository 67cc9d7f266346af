"""Defines the error for content that is not what was written, and what raises it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from os import PathLike
from typing import Any

import torch

from lightning_axosparse.support.arguments import shown
from lightning_axosparse.support.troubleshooting import see, without_link

_LARGEST = 2**63 - 1
"""Bytes of a tensor, as torch counts them; the widest entry has 16."""


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
    """Raise a :class:`CorruptFileError` that names ``path`` for any exception but MemoryError.

    Which exceptions readers raise depends on the bytes of the file.
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
    """Raise a :class:`CorruptFileError` for a missing entry, or one of another type.

    Errors of other kinds say themselves what does not fit, such as a shape.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptFileError(reason, f"The state of {what} in the checkpoint") from error


def stored_shape(value: Any, what: str) -> torch.Size:
    """Return a shape that a file declares; raise a :class:`CorruptFileError` if it is none.

    ``torch.Size`` takes any whole numbers, and its ``numel`` counts past 64 bits from the start.
    """
    sizes = tuple(value) if isinstance(value, list | tuple) else (repr(value),)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise CorruptFileError(f"{what} has the shape {shown(sizes)}")
    if 16 * prod(size for size in sizes if size) > _LARGEST:
        raise CorruptFileError(f"{what} has the shape {shown(sizes)}, which no memory holds")
    return torch.Size(sizes)
