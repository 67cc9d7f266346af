"""Reads shapes of tensors from files, and refuses what no tensor can have."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from lightning_axosparse.support.arguments import shown
from lightning_axosparse.support.corrupt_file import CorruptFileError

_LARGEST = 2**63 - 1
"""Bytes of a tensor, as torch counts them; the widest entry has 16."""


def stored_shape(value: Any, what: str) -> torch.Size:
    """Return a shape that a file declares.

    ``torch.Size`` takes any whole numbers, and its ``numel`` counts past 64 bits from the start.

    Args:
        value: should be a list of sizes.
        what: whose shape it is, for the error message.

    Raises:
        CorruptFileError: if it is none.
    """
    sizes = tuple(value) if isinstance(value, list | tuple) else (repr(value),)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise CorruptFileError(f"{what} has the shape {shown(sizes)}")
    if 16 * prod(size for size in sizes if size) > _LARGEST:
        raise CorruptFileError(f"{what} has the shape {shown(sizes)}, which no memory holds")
    return torch.Size(sizes)
