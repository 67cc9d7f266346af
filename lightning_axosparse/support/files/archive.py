"""Writes files of ``torch.save`` atomically with a checksum, and verifies it before reading.

They are ordinary zip archives. The comment at the end, which other readers ignore, has a checksum
of everything before it; ``torch.load`` itself checks none.
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

_COMMENT = b"lightning_axosparse crc32 %08x"
_SIZE = len(_COMMENT % 0)
_BLOCK = 1 << 20

_NO_COMMENT = (0).to_bytes(2, "little")
"""The last field of an archive without a comment: the length of the comment."""

_END = b"PK\x05\x06"
_END_SIZE = 22


def save(content: Any, path: str | os.PathLike[str]) -> None:
    """Write ``content`` as ``torch.save`` does, tensor by tensor; replace an older file at the end.

    Args:
        content: what ``torch.save`` takes; deferred tensors are made one after the other.
        path: the file.

    Raises:
        OSError: if it cannot be written; an older file is then unchanged.
    """
    with replacing(path) as file:
        checked = _ChecksumWriter(file)
        try:
            torch.save(content, cast(BinaryIO, checked), pickle_module=_PICKLE)
        except RuntimeError as error:
            # torch reports a failed write only as an unexpected position in the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        # A `torch.save` that is replaced, as in tests of what is saved how often, writes nothing.
        file.seek(max(0, file.tell() - len(_NO_COMMENT)))
        file.write(_SIZE.to_bytes(2, "little") + _COMMENT % checked.checksum)


def check(path: str | os.PathLike[str]) -> None:
    """Read a file of ``torch.save`` once, a block at a time, and verify its checksums.

    Args:
        path: the file; if :func:`save` did not write it, the checksums of its records are verified.

    Raises:
        OSError: if the file cannot be opened.
        CorruptFileError: if its content is not what was written.
    """
    with open(path, "rb") as file, reading(path):
        if file.read(4) != b"PK\x03\x04":
            raise CorruptFileError("it does not begin as torch.save's files do")
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_SIZE - _SIZE))
        end = file.read()
        file.seek(0)
        if end[-_SIZE:-8] == _COMMENT[:-4]:
            _verify_comment(file, size, end)
            check_records(file, with_checksums=False)
        elif end[-_END_SIZE:][:4] == _END and end[-2:] == _NO_COMMENT:
            check_records(file)
        else:
            raise CorruptFileError("its end is missing or changed")


def check_records(file: BinaryIO, with_checksums: bool = True) -> None:
    """Check that the records of a zip archive are whole, and take no more memory than the archive.

    Args:
        file: the archive.
        with_checksums: whether to read the records and verify the checksum of each.

    Raises:
        CorruptFileError: if a record is compressed, or shares its bytes with another.
        zipfile.BadZipFile: if one has changed.
    """
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
        if not stored or sum(record.file_size for record in records) > size:
            raise CorruptFileError("its records are compressed or overlap, as torch.save's do not")
        for record in records:
            # Without a checksum: written after torch.serialization.set_crc32_options(False).
            if with_checksums and record.CRC:
                with archive.open(record) as part:
                    checksum(cast(BinaryIO, part))  # raises at the end if the checksum differs


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


class _ChecksumWriter:
    """A file for ``torch.save`` that computes the CRC-32 of what is written.

    Args:
        file: the file that is written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.checksum = 0

    def write(self, data: Any) -> int:
        """Write ``data``, a bytes-like object."""
        self.checksum = crc32(data, self.checksum)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def _verify_comment(file: BinaryIO, size: int, end: bytes) -> None:
    before = checksum(file, size=size - _SIZE - len(_NO_COMMENT))
    comment = _SIZE.to_bytes(2, "little") + _COMMENT % crc32(_NO_COMMENT, before)
    if end[-len(comment) :] != comment:
        raise CorruptFileError("its checksum does not match its content")
