"""Encodes the kept entries of a tensor and their positions in few bytes, for files.

Positions are stored as the distances between kept entries, one byte each, and values byte plane by
byte plane. Both are compressed with Huffman codes: deflate without its search for repetitions,
which finds none here. For random masks the distances come within 1-2 % of their entropy, as Golomb
codes would; the exponents of what magnitude pruning keeps take about two bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support.corrupt_file import CorruptFileError

_ESCAPE = 255
"""A byte of distance that means this many pruned entries and no kept entry after them."""


def encoded(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Encode kept entries.

    Args:
        values: kept entries in the order of the flattened tensor, shape ``(nnz,)``.
        mask: bool, of the dense tensor's shape, True where an entry is kept.

    Returns:
        The positions and the values, as rows of bytes.
    """
    # Little-endian, as in the file: the last plane has the signs and exponents.
    rows = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    planes = rows.reshape(-1, values.dtype.itemsize).T
    return _deflate([_distances(mask)]), _deflate([plane.copy() for plane in planes])


def decoded_mask(index: Tensor, shape: torch.Size) -> Tensor:
    """Return a bool tensor of the dense ``shape``, True where an entry is kept; on CPU.

    Args:
        index: the encoded positions.
        shape: of the dense tensor.

    Raises:
        CorruptFileError: if a position is outside of the tensor.
    """
    entries = shape.numel()
    steps = np.frombuffer(_inflate(index, entries), np.uint8)
    ends = steps != _ESCAPE
    kept = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(int(ends.sum()))
    if kept.size and kept[-1] >= entries:
        raise CorruptFileError("an encoded tensor keeps entries that its shape does not have")
    mask = np.zeros(entries, dtype=np.bool_)
    mask[kept] = True
    return torch.from_numpy(mask).view(shape)


def decoded(values: Tensor, mask: Tensor, dtype: torch.dtype) -> SparseWeight:
    """Return a tensor with the dense shape that stores only its kept entries; on CPU.

    Args:
        values: the encoded kept entries.
        mask: of :func:`decoded_mask`.
        dtype: of the entries.

    Raises:
        CorruptFileError: if there are fewer values than positions.
    """
    size = int(mask.count_nonzero()) * dtype.itemsize
    planes = np.frombuffer(_inflate(values, size), np.uint8)
    if planes.size != size:
        raise CorruptFileError("an encoded tensor has fewer values than positions")
    rows = planes.reshape(dtype.itemsize, -1).T.copy()
    return SparseWeight(torch.from_numpy(rows).view(-1).view(dtype), layout_of(mask))


def _distances(mask: Tensor) -> np.ndarray[Any, Any]:
    """Return the number of pruned entries before each kept one, as bytes that add up to it."""
    kept = np.flatnonzero(mask.detach().cpu().numpy())
    distances = np.diff(kept, prepend=-1) - 1
    escapes = distances // _ESCAPE
    coded = np.full(int(escapes.sum()) + len(kept), _ESCAPE, np.uint8)
    coded[np.cumsum(escapes) + np.arange(len(kept))] = distances % _ESCAPE
    return coded


def _deflate(parts: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    """Compress bytes, each part with a code table of its own; uint8."""
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY, memLevel=9)
    code = bytearray()  # memory that torch may write to
    for part in parts:
        code += coder.compress(part.data) + coder.flush(zlib.Z_SYNC_FLUSH)
    return torch.frombuffer(code + coder.flush(), dtype=torch.uint8)


def _inflate(code: Tensor, limit: int) -> bytes:
    """Return the bytes that were compressed; more than ``limit`` are an error.

    A byte of distance covers at least one entry, so an index has no more bytes than entries. A
    Huffman code has at least one bit, so nothing becomes more than eight times as large.
    """
    if code.dtype != torch.uint8 or code.dim() != 1:
        raise CorruptFileError("what encodes a tensor is not a row of bytes")
    decoder, limit = zlib.decompressobj(), min(limit, 8 * code.numel())
    try:
        content = decoder.decompress(code.numpy().data, limit + 1)  # 0 would set no limit
    except zlib.error as error:
        raise CorruptFileError(f"an encoded tensor cannot be decoded: {error}") from error
    if len(content) > limit or not decoder.eof:
        raise CorruptFileError("an encoded tensor holds more or less than its shape says")
    return content
