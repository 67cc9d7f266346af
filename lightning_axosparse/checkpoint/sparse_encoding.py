"""Encodes the kept entries of a tensor and their positions in few bytes, for files.

Positions are stored as the distances between kept entries, one byte each, and values byte plane by
byte plane. Both are compressed with Huffman codes: deflate without its search for repetitions,
which finds none here. For random masks the distances come within 1-2 % of their entropy, as Golomb
codes would; the exponents of what magnitude pruning keeps take about two bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support.corrupt_file import CorruptFileError
from lightning_axosparse.support.files.stored_shape import stored_shape

_ESCAPE = 255
"""A byte of distance that means this many pruned entries and no kept entry after them."""


@dataclass(frozen=True)
class EncodedTensor:
    """One tensor with its kept entries and their positions encoded.

    Attributes:
        shape: shape of the dense tensor.
        dtype: its dtype.
        index: the encoded positions of the kept entries; uint8, 1-D.
        values: the encoded kept entries; uint8, 1-D.

    Raises:
        CorruptFileError: for fields of other types.
    """

    shape: torch.Size
    dtype: torch.dtype
    index: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        stored_shape(self.shape, "an encoded tensor")
        if not isinstance(self.dtype, torch.dtype):
            raise CorruptFileError(f"{self.dtype!r} is no dtype of an encoded tensor")
        for name, code in (("index", self.index), ("values", self.values)):
            if not isinstance(code, Tensor) or code.dtype != torch.uint8 or code.dim() != 1:
                raise CorruptFileError(f"the {name} of an encoded tensor is not a row of bytes")

    @classmethod
    def encode(cls, values: Tensor, mask: Tensor) -> EncodedTensor:
        """Encode kept entries.

        Args:
            values: kept entries in the order of the flattened tensor, shape ``(nnz,)``.
            mask: bool, of the dense tensor's shape, True where an entry is kept.
        """
        # Little-endian, as in the file: the last plane has the signs and exponents.
        rows = values.detach().cpu().contiguous().view(torch.uint8).numpy()
        planes = rows.reshape(-1, values.dtype.itemsize).T
        index, code = _deflate([_distances(mask)]), _deflate([plane.copy() for plane in planes])
        return cls(mask.shape, values.dtype, index, code)

    def mask(self) -> Tensor:
        """Return a bool tensor of the dense shape, True where an entry is kept; on CPU.

        Raises:
            CorruptFileError: if a position is outside of the tensor.
        """
        entries = self.shape.numel()
        steps = np.frombuffer(_inflate(self.index, entries), np.uint8)
        ends = steps != _ESCAPE
        kept = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(int(ends.sum()))
        if kept.size and kept[-1] >= entries:
            raise CorruptFileError("an encoded tensor keeps entries that its shape does not have")
        mask = np.zeros(entries, dtype=np.bool_)
        mask[kept] = True
        return torch.from_numpy(mask).view(self.shape)

    def decode(self) -> SparseWeight:
        """Return the tensor, with the dense shape and storing only its kept entries; on CPU.

        Raises:
            CorruptFileError: if there are fewer values than positions.
        """
        mask = self.mask()
        size = int(mask.count_nonzero()) * self.dtype.itemsize
        planes = np.frombuffer(_inflate(self.values, size), np.uint8)
        if planes.size != size:
            raise CorruptFileError("an encoded tensor has fewer values than positions")
        rows = planes.reshape(self.dtype.itemsize, -1).T.copy()
        return SparseWeight(torch.from_numpy(rows).view(-1).view(self.dtype), layout_of(mask))


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
    decoder, limit = zlib.decompressobj(), min(limit, 8 * code.numel())
    try:
        content = decoder.decompress(code.numpy().data, limit + 1)  # 0 would set no limit
    except zlib.error as error:
        raise CorruptFileError(f"an encoded tensor cannot be decoded: {error}") from error
    if len(content) > limit or not decoder.eof:
        raise CorruptFileError("an encoded tensor holds more or less than its shape says")
    return content
