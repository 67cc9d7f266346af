"""Writes and reads a module's weights as safetensors, sparse or dense, one tensor at a time.

Sparse weights are stored as values and positions: values byte plane by byte plane, positions as the
distances between unpruned entries, one byte each. Both are compressed with Huffman codes:
deflate without its search for repetitions, which finds none here. For random masks the distances
come within 1-2 % of their entropy, as Golomb codes would; the exponents of values after magnitude
pruning take about two bits.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support.arguments import BOOL, MODULE, PATH, checked
from lightning_axosparse.support.files import CorruptFileError, reading, replacing, stored_shape
from lightning_axosparse.support.troubleshooting import see

_KEY = "lightning_axosparse.sparse/2"
"""The entry of a file's metadata with the shape and dtype of each sparse tensor."""

_WRITER, _CHECKSUM = "lightning_axosparse.writer", "lightning_axosparse.crc32"
"""Entries of the metadata: the writer of the file, and the CRC-32 of all of it.

They are first and last, so that damage to one does not hide that there was a checksum.
"""

_UNSUMMED = "0" * 8
"""The checksum field while the checksum is computed."""

_BLOCK = 1 << 20

_LONGEST_HEADER = 100_000_000
"""Bytes; the same limit as in the library."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}

_ESCAPE = 255
"""A byte of distance that means this many pruned entries and no unpruned entry after them."""


@checked(ValueError, module=MODULE, path=PATH, sparse=BOOL)
def save_safetensors(module: nn.Module, path: str | Path, sparse: bool = True) -> None:
    """Write the state of ``module`` to a safetensors file; materialize one tensor at a time.

    Args:
        module: the model; some of its parameters may be stored sparse.
        path: the file.
        sparse: write sparsely stored parameters as unpruned values and encoded positions, for
            :func:`lightning_axosparse.load_sparse`. Otherwise the file is dense and every reader of
            safetensors can load it.

    Raises:
        ValueError: for an argument of another type, and for state that is not a tensor or has a
            dtype that the format does not have.
    """
    tensors: dict[str, Tensor] = {}
    metadata = {_WRITER: "2", "format": "pt"}
    described: dict[str, dict[str, Any]] = {}
    first_names: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.dtype not in _CODES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"'{name}' is of {kind}; safetensors cannot hold it." + see("checkpoints")
            )
        first = first_names.setdefault(id(getattr(value, "sparse_layout", value)), name)
        if first != name:
            metadata[name] = first  # tied: as safetensors.torch.save_model notes it
        elif sparse and isinstance(value, SparseWeight):
            index, values = encode(value.unpruned_values(), value.sparse_layout.mask())
            tensors[f"{name}.index"], tensors[f"{name}.values"] = index, values
            dtype = str(value.dtype).removeprefix("torch.")
            described[name] = {"shape": list(value.shape), "dtype": dtype}
        else:
            tensors[name] = value.detach()
    if described:
        metadata[_KEY] = json.dumps(described)
    _write(path, tensors, metadata)


def is_safetensors(path: Path) -> bool:
    """Whether a file is one of safetensors: by its suffix, or as it begins with a JSON header."""
    if path.suffix == ".safetensors" or not path.is_file():
        return path.suffix == ".safetensors"
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


class SafetensorsState(Mapping[str, Tensor]):
    """The state in a safetensors file, by name; tensors are read on access.

    Sparse ones are a :class:`SparseWeight` of the dense shape. A file of :func:`save_safetensors`
    is read once before, a block at a time, to verify its checksum.
    """

    def __init__(self, path: str | Path) -> None:
        _check(path)
        self._path = path
        with reading(path):
            self._file = safe_open(path, framework="pt")
            metadata = dict(self._file.metadata() or {})
            self._described = {
                name: (stored_shape(entry["shape"], repr(name)), _DTYPES[entry["dtype"]])
                for name, entry in json.loads(metadata.pop(_KEY, "{}")).items()
            }
            parts = {f"{name}.{part}" for name in self._described for part in ("index", "values")}
            names: list[str] = self._file.keys()
            self._first = {n: n for n in (*self._described, *names) if n not in parts}
            self._first.update({k: v for k, v in metadata.items() if v in self._first})

    @property
    def sparse(self) -> list[str]:
        """The names of the tensors stored sparse in the file; of tied names the first."""
        return list(self._described)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The dense shape of each tensor."""
        return {name: self._shape(first) for name, first in self._first.items()}

    def _shape(self, first: str) -> torch.Size:
        if first in self._described:
            return self._described[first][0]
        return torch.Size(self._file.get_slice(first).get_shape())

    def mask(self, name: str) -> Tensor:
        """Return the mask of one of the ``sparse`` tensors."""
        with reading(self._path):
            return decode_mask(self._file.get_tensor(f"{name}.index"), self._shape(name))

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        if first in self._described:
            mask, (_, dtype) = self.mask(first), self._described[first]
            with reading(self._path):
                return decode(self._file.get_tensor(f"{first}.values"), mask, dtype)
        tensor: Tensor = self._file.get_tensor(first)
        return tensor

    def __contains__(self, name: object) -> bool:  # without reading the tensor
        return name in self._first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


def _write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; each tensor is materialized on CPU just before its write.

    The library's own writer takes all of them in memory at once.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # for alignment
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        shape, code = list(tensor.shape), _CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    unsummed = _head(header, _UNSUMMED)
    checksum = crc32(unsummed)
    with replacing(path) as file:
        file.write(unsummed)
        for _, tensor in ordered:
            dense = tensor.dense() if isinstance(tensor, SparseWeight) else tensor
            data = dense.reshape(-1).contiguous().cpu().view(torch.uint8).numpy().data
            checksum = crc32(data, checksum)
            file.write(data)
        file.seek(0)
        file.write(_head(header, f"{checksum:08x}"))


def _head(header: dict[str, Any], checksum: str) -> bytes:
    """Return the bytes before the tensors: the header's length and the header."""
    header["__metadata__"][_CHECKSUM] = checksum
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check(path: str | Path) -> None:
    """Verify the checksum of a file of :func:`save_safetensors`, a block at a time."""
    with open(path, "rb") as file, reading(path):
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            raise CorruptFileError(f"its header would have {length} bytes")
        file.seek(0)
        head = file.read(8 + length)
        if b"lightning_axosparse." not in head:
            return  # of another writer, without a checksum
        match = re.search(rb'"%s": "([0-9a-f]{8})"' % re.escape(_CHECKSUM).encode(), head)
        if match is None:
            raise CorruptFileError("it has no checksum")
        unsummed = head[: match.start(1)] + _UNSUMMED.encode() + head[match.end(1) :]
        checksum = crc32(unsummed)
        while block := file.read(_BLOCK):
            checksum = crc32(block, checksum)
        if match[1] != b"%08x" % checksum:
            raise CorruptFileError("its checksum does not match its content")


def encode(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Encode unpruned values, of shape ``(nnz,)``, and their positions in the bool mask.

    Returns:
        The positions and the values, as rows of bytes.
    """
    # Little-endian, as in the file: the last plane has the signs and exponents.
    rows = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    planes = rows.reshape(-1, values.dtype.itemsize).T
    return _deflate([_distances(mask)]), _deflate([plane.copy() for plane in planes])


def decode_mask(index: Tensor, shape: torch.Size) -> Tensor:
    """Return the bool mask of a dense ``shape`` from its encoded positions, on CPU."""
    entries = shape.numel()
    steps = np.frombuffer(_inflate(index, entries), np.uint8)
    ends = steps != _ESCAPE
    positions = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(int(ends.sum()))
    if positions.size and positions[-1] >= entries:
        raise CorruptFileError("an encoded tensor keeps entries that its shape does not have")
    mask = np.zeros(entries, dtype=np.bool_)
    mask[positions] = True
    return torch.from_numpy(mask).view(shape)


def decode(values: Tensor, mask: Tensor, dtype: torch.dtype) -> SparseWeight:
    """Return the sparse weight of encoded values, on CPU."""
    size = int(mask.count_nonzero()) * dtype.itemsize
    planes = np.frombuffer(_inflate(values, size), np.uint8)
    if planes.size != size:
        raise CorruptFileError("an encoded tensor has fewer values than positions")
    rows = planes.reshape(dtype.itemsize, -1).T.copy()
    return SparseWeight(torch.from_numpy(rows).view(-1).view(dtype), layout_of(mask))


def _distances(mask: Tensor) -> np.ndarray[Any, Any]:
    """Return the number of pruned entries before each unpruned one, as bytes that add up to it."""
    positions = np.flatnonzero(mask.detach().cpu().numpy())
    distances = np.diff(positions, prepend=-1) - 1
    escapes = distances // _ESCAPE
    coded = np.full(int(escapes.sum()) + len(positions), _ESCAPE, np.uint8)
    coded[np.cumsum(escapes) + np.arange(len(positions))] = distances % _ESCAPE
    return coded


def _deflate(parts: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    """Compress bytes, with a code table for each part; uint8."""
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
        raise CorruptFileError("an encoded tensor is not a row of bytes")
    decoder, limit = zlib.decompressobj(), min(limit, 8 * code.numel())
    try:
        content = decoder.decompress(code.numpy().data, limit + 1)  # 0 would set no limit
    except zlib.error as error:
        raise CorruptFileError(f"an encoded tensor cannot be decoded: {error}") from error
    if len(content) > limit or not decoder.eof:
        raise CorruptFileError("an encoded tensor holds more or less than its shape says")
    return content
