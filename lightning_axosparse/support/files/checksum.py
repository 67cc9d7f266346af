"""Computes the checksum of files, and of records of plain values and tensors: a CRC-32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO
from zlib import crc32

import torch
from torch import Tensor

from lightning_axosparse.support.corrupt_file import CorruptFileError

_KEY = "crc32"
_BLOCK = 1 << 20


def of_file(file: BinaryIO, before: int = 0, size: int | None = None) -> int:
    """The checksum of what follows in a file, which is read a block at a time.

    Args:
        file: an open file.
        before: the checksum of what precedes it.
        size: number of bytes; None for all up to the end.
    """
    left = float("inf") if size is None else size
    while left > 0 and (block := file.read(int(min(_BLOCK, left)))):
        before, left = crc32(block, before), left - len(block)
    return before


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with a CRC-32 of its names, values, dtypes, shapes and order.

    Args:
        record: plain values, containers of them, and tensors.
    """
    return {**record, _KEY: _checksum(record)}


def verified(record: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The argument of :func:`with_checksum` that returned ``record``.

    Args:
        record: a record with a checksum.
        what: what it is, for the error message.

    Raises:
        CorruptFileError: if something in it has changed, or it has no checksum.
    """
    rest = {name: value for name, value in record.items() if name != _KEY}
    if record.get(_KEY) != _checksum(rest):
        raise CorruptFileError(f"the checksum of {what} does not match its content")
    return rest


def _checksum(value: Any, before: int = 0) -> int:
    """CRC-32 of ``value`` after data with the CRC-32 ``before``."""
    if isinstance(value, Tensor):
        described = crc32(repr((value.dtype, tuple(value.shape))).encode(), before)
        flat = value.detach().cpu().contiguous().reshape(-1)
        return crc32(flat.view(torch.uint8).numpy().data, described)
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if not isinstance(value, list | tuple):
        return crc32(repr(value).encode() + b"\n", before)
    total = crc32(f"{len(value)} values\n".encode(), before)
    for part in value:
        total = _checksum(part, total)
    return total
