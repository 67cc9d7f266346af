"""Archives: files of ``torch.save`` that are written whole and checked before they are read.

They are ordinary ones. The archive's comment, which every reader passes over, has a checksum of all
that is before it; ``torch.load`` itself looks at no checksum.
"""

from __future__ import annotations

import os
import zipfile
from typing import Any, BinaryIO, cast
from zlib import crc32

import torch

from lightning_axosparse.corrupt import CorruptFileError, reading
from lightning_axosparse.replacing import replacing

_COMMENT = b"lightning_axosparse crc32 %08x"
_SIZE = len(_COMMENT % 0)
_NONE = (0).to_bytes(2, "little")
"""The last field of an archive without a comment: the comment's length."""

_END = b"PK\x05\x06"
_END_SIZE = 22
_BLOCK = 1 << 20


def save(content: Any, path: str | os.PathLike[str]) -> None:
    """Write ``content`` as ``torch.save`` does, tensor by tensor, in the place of an older file.

    Args:
        content: what ``torch.save`` takes.
        path: the file.

    Raises:
        OSError: if it cannot be written; an older file is as it was then.
    """
    with replacing(path) as file:
        summed = _Summed(file)
        try:
            torch.save(content, cast(BinaryIO, summed))
        except RuntimeError as error:
            # The archive's writer tells only that positions are not as expected.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.seek(-len(_NONE), 2)
        file.write(_SIZE.to_bytes(2, "little") + _COMMENT % summed.checksum)


def check(path: str | os.PathLike[str]) -> None:
    """Read a file of ``torch.save`` once, a block at a time, to see whether it is whole.

    Args:
        path: a file, written here or by others; of the latter the checksums of their records serve.

    Raises:
        OSError: if the file cannot be opened.
        CorruptFileError: if it is not as it was written.
    """
    with open(path, "rb") as file, reading(path):
        if file.read(4) != b"PK\x03\x04":
            raise CorruptFileError("it does not begin as torch.save's files do")
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_SIZE - _SIZE))
        end = file.read()
        file.seek(0)
        if end[-_SIZE:-8] == _COMMENT[:-4]:
            _check_comment(file, size, end)
        elif end[-_END_SIZE:][:4] == _END and end[-2:] == _NONE:
            _check_records(file)
        else:
            raise CorruptFileError("its end is missing or changed")


class _Summed:
    """A file for ``torch.save`` to write to, and the CRC-32 of what was written.

    Args:
        file: where to write.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.checksum = 0

    def write(self, data: Any) -> int:
        """Write ``data``, a bytes-like object."""
        self.checksum = crc32(data, self.checksum)
        return self._file.write(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()


def _check_comment(file: BinaryIO, size: int, end: bytes) -> None:
    checksum, left = 0, size - _SIZE - len(_NONE)
    while left > 0:
        block = file.read(min(_BLOCK, left))
        checksum, left = crc32(block, checksum), left - len(block)
    comment = _SIZE.to_bytes(2, "little") + _COMMENT % crc32(_NONE, checksum)
    if end[-len(comment) :] != comment:
        raise CorruptFileError("its checksum does not match its content")


def _check_records(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.CRC == 0:  # as torch.serialization.set_crc32_options(False) leaves it
                continue
            with archive.open(record) as part:
                while part.read(_BLOCK):  # raises at its end if it is not as the checksum says
                    pass
