"""Writes files of ``torch.save`` atomically, and verifies them before reading.

They are zip archives, of which each record has a checksum; ``torch.load`` itself checks none.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from types import SimpleNamespace
from typing import Any, BinaryIO, cast
from zlib import crc32

import torch

from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.files.atomic_file import replacing
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor
from lightning_axosparse.support.torch_internals import reduced_for_save

_BLOCK = 1 << 20


def save(content: Any, path: str | os.PathLike[str]) -> None:
    """Write ``content`` as ``torch.save`` does, tensor by tensor; replace an older file at the end.

    Args:
        content: what ``torch.save`` takes; deferred tensors are made one after the other.
        path: the file.

    Raises:
        OSError: if it cannot be written; an older file is then unchanged.
    """
    with replacing(path) as file:
        try:
            torch.save(content, file, pickle_module=_PICKLE)
        except RuntimeError as error:
            # torch reports a failed write only as an unexpected position in the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def check(path: str | os.PathLike[str]) -> None:
    """Read a file of ``torch.save`` once, a block at a time, and verify its records' checksums.

    Raises:
        OSError: if the file cannot be opened.
        CorruptFileError: if its content is not what was written, or takes more memory than it.
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
            for record in records:
                # Without one: written after torch.serialization.set_crc32_options(False).
                if record.CRC:
                    with archive.open(record) as part:
                        checksum(cast(BinaryIO, part))  # raises at the end if it differs


def checksum(file: BinaryIO, before: int = 0, size: int | None = None) -> int:
    """Return the CRC-32 of what follows in a file, which is read a block at a time.

    Args:
        file: an open file.
        before: the checksum of what precedes it.
        size: number of bytes; None for all up to the end.
    """
    left = float("inf") if size is None else size
    while left > 0 and (block := file.read(int(min(_BLOCK, left)))):
        before, left = crc32(block, before), left - len(block)
    return before


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DeferredTensor):
            return reduced_for_save(value.shape, value.dtype, value.made)
        return NotImplemented


_PICKLE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
