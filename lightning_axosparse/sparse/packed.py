"""Packed: the kept entries of a tensor and their places in few bytes, for files.

The places are the distances between kept entries, a byte each, the values are laid out byte plane
by byte plane, and Huffman codes (deflate without its search for repetitions, which only costs time
here) take what is regular in both. For random masks the distances come within 1-2 % of their
entropy, as Golomb codes would; the exponents of what magnitude pruning keeps take some two bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.formats import layout_of
from lightning_axosparse.sparse.weight import SparseWeight

_ESCAPE = 255
"""A byte of distance that stands for this many pruned entries and no kept one behind them."""

_FORMAT = "lightning_axosparse.Packed/1"


@dataclass(frozen=True)
class Packed:
    """One tensor, packed.

    Attributes:
        shape: shape of the dense tensor.
        dtype: its dtype.
        index: the places of the kept entries, coded; uint8, 1-D.
        values: the kept entries, coded; uint8, 1-D.
    """

    shape: torch.Size
    dtype: torch.dtype
    index: Tensor
    values: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Packed:
        """Pack kept entries.

        Args:
            values: kept entries in the order of the flattened tensor, shape ``(nnz,)``.
            mask: bool, of the dense tensor's shape, True where an entry is kept.
        """
        # Little end first, as in the file: the last plane has signs and exponents.
        rows = values.detach().cpu().contiguous().view(torch.uint8).numpy()
        planes = rows.reshape(-1, values.dtype.itemsize).T
        index, coded = _deflate([_distances(mask)]), _deflate([plane.copy() for plane in planes])
        return cls(mask.shape, values.dtype, index, coded)

    @classmethod
    def of_nonzeros(cls, dense: Tensor) -> Packed:
        """Pack the entries of ``dense`` whose bits are not all zero: without loss."""
        mask = dense.view(_BITS[dense.dtype.itemsize]) != 0
        return cls.of(dense[mask], mask)

    def mask(self) -> Tensor:
        """True where an entry is kept; bool, of the dense tensor's shape, on CPU."""
        steps = np.frombuffer(_inflate(self.index), np.uint8)
        ends = steps != _ESCAPE
        kept = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(int(ends.sum()))
        mask = np.zeros(self.shape.numel(), dtype=np.bool_)
        mask[kept] = True
        return torch.from_numpy(mask).view(self.shape)

    def lazy(self) -> SparseWeight:
        """The tensor, with the dense shape and only the kept entries inside; on CPU."""
        planes = np.frombuffer(_inflate(self.values), np.uint8).reshape(self.dtype.itemsize, -1)
        values = torch.from_numpy(planes.T.copy()).view(-1).view(self.dtype)
        return SparseWeight(values, layout_of(self.mask()))

    def record(self) -> dict[str, Any]:
        """Plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        return {"format": _FORMAT, **vars(self), "shape": list(self.shape)}

    @staticmethod
    def is_record(value: Any) -> bool:
        """Whether ``value`` came from :meth:`record`."""
        return isinstance(value, dict) and value.get("format") == _FORMAT

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Packed:
        """What :meth:`record` described."""
        fields = {name: value for name, value in record.items() if name != "format"}
        return cls(**{**fields, "shape": torch.Size(record["shape"])})


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _distances(mask: Tensor) -> np.ndarray[Any, Any]:
    """The number of pruned entries before each kept one, in bytes that add up to it."""
    kept = np.flatnonzero(mask.detach().cpu().numpy())
    distances = np.diff(kept, prepend=-1) - 1
    escapes = distances // _ESCAPE
    coded = np.full(int(escapes.sum()) + len(kept), _ESCAPE, np.uint8)
    coded[np.cumsum(escapes) + np.arange(len(kept))] = distances % _ESCAPE
    return coded


def _deflate(parts: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    """Code bytes, each part by a table of its own; uint8."""
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY, memLevel=9)
    coded = bytearray()  # memory that torch may write to
    for part in parts:
        coded += coder.compress(part.data) + coder.flush(zlib.Z_SYNC_FLUSH)
    return torch.frombuffer(coded + coder.flush(), dtype=torch.uint8)


def _inflate(coded: Tensor) -> bytes:
    return zlib.decompress(coded.numpy().data)
