"""Reads where ``torch.distributed.checkpoint`` has put tensors, and calls nothing meanwhile.

Its ``.metadata`` is a pickle, which may name any function. Here it may name the classes of torch's
format alone, and these become records of what they hold. All that a reader needs is checked before
anything is read: names of files, places in them, shapes, and that the chunks of a tensor fill it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from lightning_axosparse.checkpoint.folder import manifest
from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.files.stored_shape import stored_shape

NAME = ".metadata"

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    # The path that the folder had when it was written.
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
}
"""By module, what torch's format names. Nothing of it is called."""


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor in a file.

    Attributes:
        offsets: of its first entry in the tensor.
        sizes: its shape.
        file: name of the file in the folder.
        start: its first byte there.
        length: its bytes there: an archive of ``torch.save``.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a folder.

    Attributes:
        path: the keys that lead to it in what was saved.
        shape: of the tensor.
        dtype: of the tensor.
        chunks: that fill it.
    """

    path: tuple[str | int, ...]
    shape: torch.Size
    dtype: torch.dtype
    chunks: list[Chunk]


@dataclass(frozen=True)
class StoredValue:
    """What is no tensor.

    Attributes:
        path: the keys that lead to it in what was saved.
        place: where it is; it has no sizes.
    """

    path: tuple[str | int, ...]
    place: Chunk


def stored(folder: Path) -> dict[str, StoredTensor | StoredValue]:
    """Return what is in a folder, by name.

    Args:
        folder: to which ``torch.distributed.checkpoint`` has written.

    Raises:
        CorruptFileError: if its metadata is not what torch writes, or does not fit its files.
    """
    with reading(folder):
        with manifest.opened(folder, NAME) as file:
            metadata = _Unpickler(BytesIO(file.read())).load().fields
        places = {
            (index.fields["fqn"], tuple(index.fields.get("offset") or ())): info.fields
            for index, info in metadata["storage_data"].items()
        }
        paths = metadata.get("planner_data") or {}
        files = _Files(folder)
        return {
            name: _stored(name, entry.fields, paths.get(name, (name,)), places, files)
            for name, entry in metadata["state_dict_metadata"].items()
        }


def _stored(
    name: str,
    fields: Mapping[str, Any],
    path: tuple[str | int, ...],
    places: Mapping[Any, Any],
    files: _Files,
) -> StoredTensor | StoredValue:
    what = repr(name)
    if "chunks" not in fields:
        value = _chunk((), (), places[name, ()], what)
        files.validate(value, 1, what)
        return StoredValue(path, value)
    shape, dtype = stored_shape(fields["size"], what), fields["properties"].fields[0]
    if not isinstance(dtype, torch.dtype):
        raise CorruptFileError(f"{what} has the dtype {dtype!r}")
    chunks = []
    for entry in fields["chunks"]:
        offsets, sizes = (stored_shape(entry.fields[key], what) for key in ("offsets", "sizes"))
        chunks.append(_chunk(offsets, sizes, places[name, tuple(offsets)], what))
        files.validate(chunks[-1], dtype.itemsize, what)
    if not _fill(chunks, shape):
        raise CorruptFileError(f"the chunks of {what} do not fill it")
    return StoredTensor(path, shape, dtype, chunks)


def _chunk(
    offsets: tuple[int, ...], sizes: tuple[int, ...], place: Mapping[str, Any], what: str
) -> Chunk:
    if place.get("transform_descriptors"):
        raise CorruptFileError(f"{what} is compressed by an extension of torch's")
    return Chunk(offsets, sizes, place["relative_path"], place["offset"], place["length"])


def _fill(chunks: list[Chunk], shape: torch.Size) -> bool:
    """Whether chunks cover a tensor of this shape, each entry once."""
    inside = all(
        len(chunk.sizes) == len(chunk.offsets) == len(shape)
        and all(o + n <= size for o, n, size in zip(chunk.offsets, chunk.sizes, shape, strict=True))
        for chunk in chunks
    )
    if not inside or sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        return False
    if len(chunks) < 2:
        return True
    # A sweep along the dimension that is cut most, as there may be a chunk of each of many ranks.
    dim = max(range(len(shape)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    reached: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        reached = [c for c in reached if c.offsets[dim] + c.sizes[dim] > chunk.offsets[dim]]
        if any(_overlap(chunk, other) for other in reached):
            return False
        reached.append(chunk)
    return True


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


class _Files:
    """The files of a folder, as far as chunks are in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listed = manifest.names(folder)
        self._sizes: dict[str, int] = {}

    def validate(self, chunk: Chunk, itemsize: int, what: str) -> None:
        """Check that a chunk is in its file, and that so many values of this size can be there."""
        if self._listed is not None and chunk.file not in self._listed:
            raise CorruptFileError(f"{what} is in {chunk.file!r}, which the manifest does not list")
        if chunk.file not in self._sizes:
            with manifest.opened(self._folder, chunk.file) as file:
                self._sizes[chunk.file] = file.seek(0, 2)
        inside = 0 <= chunk.start <= chunk.start + chunk.length <= self._sizes[chunk.file]
        if not inside or prod(chunk.sizes) * itemsize > chunk.length:
            raise CorruptFileError(f"{what} is larger than its part of {chunk.file!r}")


class _Record:
    """What stands for an object of the metadata; ``fields`` is the state that it was saved with."""

    fields: Any = MappingProxyType({})

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class _Unpickler(pickle._Unpickler):
    """Python's own, as the one in C allocates what an opcode asks for; without bytearrays."""

    dispatch: ClassVar = {
        opcode: load
        for opcode, load in pickle._Unpickler.dispatch.items()
        if opcode != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if name in _RECORDS.get(module, ()):
            return _Record
        raise CorruptFileError(f"{NAME} names {module}.{name}, which torch's format does not have")
