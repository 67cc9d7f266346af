"""Writes files of ``torch.save`` atomically, verifies them, and maps them into memory.

They are zip archives, in which each record has a checksum; ``torch.load`` itself checks none. The
values of a deferred tensor are computed when it is written.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.support.files import CorruptFileError, reading, replacing
from lightning_axosparse.support.torch_internals import (
    no_torch_function,
    reduced_for_save,
    tensors_in,
    tree_map_only,
)

_BLOCK = 1 << 20
_IS_FOLDER = 0x10
_LARGE = ("state_dict", "optimizer_states")
"""The entries of a checkpoint with the tensors of the full model."""


class DeferredTensor(Tensor):
    """A tensor whose values are computed when it is written; until then, it is on the meta device.

    ``torch.save`` and :func:`lightning_axosparse.support.archive.save` write it as an ordinary CPU
    tensor.

    Args:
        key: name of the tensor, unique in its checkpoint.
        shape: its shape.
        dtype: its dtype.
        compute: returns the tensor with its values; called each time that these are written.
    """

    key: str
    compute: Callable[[], Tensor]

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls,
        key: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        compute: Callable[[], Tensor],
    ) -> DeferredTensor:
        """Create the tensor without values."""
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        tensor.key, tensor.compute = key, compute
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced_for_save(self.shape, self.dtype, self.computed)

    def computed(self) -> Tensor:
        """Return the tensor with its values, on CPU."""
        return self.compute().cpu()


def all_computed(tree: Any) -> Any:
    """Return a pytree with the values of its deferred tensors; the same tensor twice stays one."""
    return tree_map_only(DeferredTensor, cached_by_identity(DeferredTensor.computed), tree)


def cached_by_identity(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls ``function`` once for each object; these must stay alive."""
    results: dict[int, Any] = {}

    def cached(value: Any) -> Any:
        if id(value) not in results:
            results[id(value)] = function(value)
        return results[id(value)]

    return cached


def save(content: Any, path: str | os.PathLike[str]) -> None:
    """Write ``content`` as ``torch.save`` does, and replace an older file at the end.

    Deferred tensors are computed one after the other. If that fails, an older file is unchanged.
    """
    with replacing(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch reports a failed write only as an unexpected position in the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def verify(path: str | os.PathLike[str]) -> None:
    """Read a file of ``torch.save`` once, a block at a time, and verify its records' checksums.

    Raises:
        CorruptFileError: if a checksum differs, or the content is larger than the file.
    """
    with open(path, "rb") as file, reading(path):
        if file.read(4) != b"PK\x03\x04":
            raise CorruptFileError("it does not begin as torch.save's files do")
        size = file.seek(0, 2)
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            stored = all(
                record.compress_type == zipfile.ZIP_STORED
                and record.compress_size == record.file_size
                for record in records
            )
            if not stored or sum(record.file_size for record in records) > size:
                raise CorruptFileError(
                    "its records are compressed or overlap, as torch.save's do not"
                )
            if any(record.external_attr & _IS_FOLDER for record in records):
                raise CorruptFileError("a record is a folder, of which torch would read nothing")
            for record in records:
                # Without one: written after torch.serialization.set_crc32_options(False).
                if record.CRC:
                    with archive.open(record) as part:
                        while part.read(_BLOCK):  # raises at the end if its checksum differs
                            pass


def load_mapped(path: Path, weights_only: bool | None) -> Any:
    """Load a file as ``torch.load`` does, with weights and optimizer state mapped copy-on-write.

    Pages of the file are read when they are used, and may be changed in memory. Other tensors are
    read at once, as the mapping exists as long as any of its tensors.

    Raises:
        CorruptFileError: if a tensor is larger than the file, whatever shape it declares.
    """
    contents: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    size = path.stat().st_size
    for tensor in tensors_in(contents):
        if tensor.layout == torch.strided and tensor.nbytes > size:
            raise CorruptFileError(f"no tensor of the shape {tuple(tensor.shape)} is in it")
    if not isinstance(contents, dict):
        return contents
    read = cached_by_identity(lambda each: each.clone() if type(each) is Tensor else each)
    return {
        key: value if key in _LARGE else tree_map_only(Tensor, read, value)
        for key, value in contents.items()
    }
