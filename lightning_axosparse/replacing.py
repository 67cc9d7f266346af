"""Replacing: a file is written whole or not at all, and takes the place of an older one at the end.

A disk that is full, or a job that is killed, then leaves the older file as it was.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

_DIGITS = 12
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Give a file beside ``path`` to write to, which becomes ``path`` if nothing is raised.

    It is on the disk, and so is its name, when this returns. What killed writers of the same
    ``path`` left is removed first.

    Args:
        path: the file to make, or to replace.

    Raises:
        IsADirectoryError: if ``path`` is a folder.
        OSError: if there is no space for the file.
    """
    goal = Path(path)
    if goal.is_dir():
        raise IsADirectoryError(
            f"'{goal}' is a folder, perhaps a sharded checkpoint, so no file of that name can be "
            "written. Move it away, or choose another name."
        )
    clear_partials(goal.parent, goal.name)
    partial = goal.with_name(f".{_start(goal.name)}.{uuid4().hex[:_DIGITS]}.partial")
    try:
        with partial.open("xb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(goal)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(goal.parent).free
        raise OSError(
            error.errno,
            f"'{goal}' was not written: {error.strerror} ({free / 1e6:.1f} MB are free there). An "
            "older file of that name is as it was. Make room, or write elsewhere",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(goal.parent)


def clear_partials(folder: str | Path, name: str | None = None) -> None:
    """Remove unfinished files whose writer is gone; those being written, here or elsewhere, stay.

    Args:
        folder: where files were written; it need not exist.
        name: the file that was to be made; None: any.
    """
    start = "*" if name is None else escape(_start(name))
    for partial in Path(folder).glob(f".{start}.{'[0-9a-f]' * _DIGITS}.partial"):
        if _writer_is_gone(partial):
            partial.unlink(missing_ok=True)


def _start(name: str) -> str:
    """So much of a file's name that a longer one made of it is not too long for the file system."""
    return name[:50]


def _lock(file: BinaryIO) -> None:
    """Show that a writer is alive; the lock ends with its process, also on another host."""
    with suppress(OSError):  # a file system without locks: the file will be left alone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _writer_is_gone(partial: Path) -> bool:
    try:
        with partial.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked by its writer, gone by now, or not ours to remove
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no such thing
            os.fsync(handle)
    finally:
        os.close(handle)
