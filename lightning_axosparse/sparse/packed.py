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

from lightning_axosparse.checksum import verified, with_checksum
from lightning_axosparse.corrupt import CorruptFileError
from lightning_axosparse.sparse.formats import layout_of
from lightning_axosparse.sparse.weight import SparseWeight

_ESCAPE = 255
"""A byte of distance that stands for this many pruned entries and no kept one behind them."""

_KIND = "lightning_axosparse.Packed/"
_FORMAT = f"{_KIND}2"


@dataclass(frozen=True)
class Packed:
    """One tensor, packed.

    Attributes:
        shape: shape of the dense tensor.
        dtype: its dtype.
        index: the places of the kept entries, coded; uint8, 1-D.
        values: the kept entries, coded; uint8, 1-D.

    Raises:
        CorruptFileError: for fields of other kinds.
    """

    shape: torch.Size
    dtype: torch.dtype
    index: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise CorruptFileError(f"a packed tensor has the shape {tuple(self.shape)}")
        if not isinstance(self.dtype, torch.dtype):
            raise CorruptFileError(f"{self.dtype!r} is no dtype of a packed tensor")
        for name, coded in (("index", self.index), ("values", self.values)):
            if not isinstance(coded, Tensor) or coded.dtype != torch.uint8 or coded.dim() != 1:
                raise CorruptFileError(f"the {name} of a packed tensor is not a row of bytes")

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
        """True where an entry is kept; bool, of the dense tensor's shape, on CPU.

        Raises:
            CorruptFileError: if the places are not in the tensor.
        """
        entries = self.shape.numel()
        steps = np.frombuffer(_inflate(self.index, entries), np.uint8)
        ends = steps != _ESCAPE
        kept = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(int(ends.sum()))
        if kept.size and kept[-1] >= entries:
            raise CorruptFileError("a packed tensor keeps entries that its shape does not have")
        mask = np.zeros(entries, dtype=np.bool_)
        mask[kept] = True
        return torch.from_numpy(mask).view(self.shape)

    def lazy(self) -> SparseWeight:
        """The tensor, with the dense shape and only the kept entries inside; on CPU.

        Raises:
            CorruptFileError: if there are not as many values as places.
        """
        mask = self.mask()
        size = int(mask.count_nonzero()) * self.dtype.itemsize
        planes = np.frombuffer(_inflate(self.values, size), np.uint8)
        if planes.size != size:
            raise CorruptFileError("a packed tensor has fewer values than places")
        rows = planes.reshape(self.dtype.itemsize, -1).T.copy()
        return SparseWeight(torch.from_numpy(rows).view(-1).view(self.dtype), layout_of(mask))

    def record(self) -> dict[str, Any]:
        """Plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        return with_checksum({"format": _FORMAT, **vars(self), "shape": list(self.shape)})

    @staticmethod
    def is_record(value: Any) -> bool:
        """Whether ``value`` came from :meth:`record`, of this version or another."""
        return isinstance(value, dict) and str(value.get("format")).startswith(_KIND)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Packed:
        """What :meth:`record` described.

        Raises:
            CorruptFileError: if it has changed, or is of another version.
        """
        if record["format"] != _FORMAT:
            raise CorruptFileError(
                f"a tensor is packed as {record['format']}, but this version of "
                f"lightning_axosparse reads {_FORMAT}"
            )
        fields = verified(record, "a packed tensor")
        shape = torch.Size(fields["shape"])
        return cls(shape, fields["dtype"], fields["index"], fields["values"])


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


def _inflate(coded: Tensor, most: int) -> bytes:
    """The bytes that were coded, of which there are ``most`` at most.

    A byte of distance covers at least one entry, so an index has no more of them than entries.
    """
    decoder = zlib.decompressobj()
    try:
        content = decoder.decompress(coded.numpy().data, most + 1)  # 0 would set no bound
    except zlib.error as error:
        raise CorruptFileError(f"a packed tensor cannot be unpacked: {error}") from error
    if len(content) > most or not decoder.eof:
        raise CorruptFileError("a packed tensor holds more or less than its shape says")
    return content
