"""Writes and reads a module's weights as safetensors, sparse or dense, one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_axosparse.checkpoint.sparse_encoding import decoded, decoded_mask, encoded
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support.arguments import BOOL, MODULE, PATH, checked
from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.files import archive
from lightning_axosparse.support.files.atomic_file import replacing
from lightning_axosparse.support.files.stored_shape import stored_shape
from lightning_axosparse.support.troubleshooting import see

_KEY = "lightning_axosparse.sparse/2"
"""The entry of a file's metadata with the shape and dtype of each sparse tensor."""

_WRITER, _CHECKSUM = "lightning_axosparse.writer", "lightning_axosparse.crc32"
"""Entries of the metadata: the writer of the file, and the CRC-32 of all of it.

They are first and last, so that damage to one does not hide that there was a checksum.
"""

_UNSUMMED = "0" * 8
"""The checksum field while the checksum is computed."""

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


@checked(ValueError, module=MODULE, path=PATH, sparse=BOOL)
def save_safetensors(module: nn.Module, path: str | Path, sparse: bool = True) -> None:
    """Write the state of ``module`` to a safetensors file; at most one tensor of it is made dense.

    Args:
        module: the model; some of its parameters may be stored sparse.
        path: the file.
        sparse: write sparsely stored parameters as their kept entries and encoded positions, for
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
        first = first_names.setdefault(id(getattr(value, "entries", value)), name)
        if first != name:
            metadata[name] = first  # tied: as safetensors.torch.save_model notes it
        elif sparse and isinstance(value, SparseWeight):
            index, values = encoded(value.kept_values(), value.entries.mask())
            tensors[f"{name}.index"], tensors[f"{name}.values"] = index, values
            dtype = str(value.dtype).removeprefix("torch.")
            described[name] = {"shape": list(value.shape), "dtype": dtype}
        else:
            tensors[name] = value.detach()
    if described:
        metadata[_KEY] = json.dumps(described)
    _write(path, tensors, metadata)


class SafetensorsState(Mapping[str, Tensor]):
    """The state in a safetensors file, by name; tensors are read on access.

    Sparse ones have the dense shape and store only their kept entries.

    Args:
        path: a file of :func:`save_safetensors` or another writer. The former is read once, a block
            at a time, to verify its checksum.

    Raises:
        OSError: if the file cannot be opened.
        CorruptFileError: if it is not as it was written.
    """

    def __init__(self, path: str | Path) -> None:
        _check(path)
        self._path = path
        with reading(path):
            self._file = safe_open(path, framework="pt")
            metadata = dict(self._file.metadata() or {})
            self._described = {
                name: (stored_shape(said["shape"], repr(name)), _DTYPES[said["dtype"]])
                for name, said in json.loads(metadata.pop(_KEY, "{}")).items()
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
            return decoded_mask(self._file.get_tensor(f"{name}.index"), self._shape(name))

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        if first in self._described:
            mask, (_, dtype) = self.mask(first), self._described[first]
            with reading(self._path):
                return decoded(self._file.get_tensor(f"{first}.values"), mask, dtype)
        tensor: Tensor = self._file.get_tensor(first)
        return tensor

    def __contains__(self, name: object) -> bool:  # without reading the tensor
        return name in self._first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


def _write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; each tensor is made dense and copied to CPU just before its write.

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
    """Verify the checksum of a file of :func:`save_safetensors`, a block at a time.

    Raises:
        OSError: if the file cannot be opened.
        CorruptFileError: if it is not as it was written.
    """
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
        found = re.search(rb'"%s": "([0-9a-f]{8})"' % re.escape(_CHECKSUM).encode(), head)
        if found is None:
            raise CorruptFileError("its checksum is missing, as in files of older versions")
        unsummed = head[: found.start(1)] + _UNSUMMED.encode() + head[found.end(1) :]
        if found[1] != b"%08x" % archive.checksum(file, crc32(unsummed)):
            raise CorruptFileError("its checksum does not match its content")
