"""Writes files and folders atomically, tells damaged ones, and makes temporary folders.

What is written is a partial file or folder, which replaces the older one when it is complete. If
the disk is full, or the job is killed, the older one is unchanged.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from math import prod
from multiprocessing import process
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch

from lightning_axosparse.support.arguments import shown
from lightning_axosparse.support.troubleshooting import see, without_link

_DIGITS = 12
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_PREFIX = "axosparse-"
LOCK = "lock"
"""The file in a folder that its process keeps locked."""
_LONGEST = 107 - len("/listener-12345678")
"""Characters of a folder in which sockets are made, whose paths may have 107."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a partial file beside ``path``; rename it to ``path`` if the context ends normally.

    Content and name are then on the disk (``fsync``). Partial files that killed writers of the same
    ``path`` left are removed first.
    """
    goal = Path(path)
    if goal.is_dir():
        raise IsADirectoryError(
            f"'{goal}' is a folder, perhaps a sharded checkpoint, so no file of that name can be "
            "written. Move it away, or choose another name." + see("files")
        )
    clear_partials(goal.parent, goal.name)
    partial = _partial(goal)
    try:
        with partial.open("xb") as file:
            _lock(file.fileno())
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
            "older file of that name is as it was. Make room, or write elsewhere." + see("files"),
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(goal.parent)


def clear_partials(folder: str | Path, name: str | None = None) -> None:
    """Remove partial files, of ``name`` or any, whose writer has ended, on this or another host."""
    start = "*" if name is None else escape(_start(name))
    for partial in Path(folder).glob(f".{start}.{'[0-9a-f]' * _DIGITS}.partial"):
        if _writer_is_gone(partial):
            _remove(partial)


def _partial(goal: Path) -> Path:
    return goal.with_name(f".{_start(goal.name)}.{uuid4().hex[:_DIGITS]}.partial")


def _start(name: str) -> str:
    """The start of a name, so that the name of the partial file is not too long."""
    return name[:50]


def _lock(file: int) -> None:
    """Lock a file or folder until this process ends; other hosts see the lock, too."""
    with suppress(OSError):  # a file system without locks, on which no partial file is removed
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _writer_is_gone(partial: Path) -> bool:
    try:
        file = os.open(partial, os.O_RDONLY if partial.is_dir() else os.O_RDWR)
    except OSError:  # already removed, or not writable
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked by its writer
        return False
    finally:
        os.close(file)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Write the names in ``folder`` to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not supported by some network file systems
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder, with a locked file in it; remove both at the end of the context.

    The operating system unlocks the file when this process ends, however it does. Folders of
    processes that were killed are removed here.
    """
    remove_orphans(Path(tempfile.gettempdir()))
    prefix = f"{_PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
        folder = Path(path)
        unlocked = folder / "unlocked"
        with unlocked.open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            # Any process that finds it unlocked under its last name may remove the folder.
            unlocked.rename(folder / LOCK)
            yield folder


def remove_orphans(folder: Path) -> None:
    """Remove this user's temporary folders in ``folder`` whose process has ended.

    Folders of this process are skipped: to open and close their file would unlock it.
    """
    for path in folder.glob(f"{_PREFIX}*-*"):
        try:
            mine = path.name.startswith(f"{_PREFIX}{os.getpid()}-")
            if mine or path.lstat().st_uid != os.getuid():
                continue
            with (path / LOCK).open("r+") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # The process still runs, or the folder is already removed.
            continue


_until_exit = ExitStack()
"""What this process removes at its exit. Here a forked child keeps it, too: from Python 3.14 on, it
lets go of what is registered with ``atexit``, and would remove the folder."""


def keep_sockets_in(folder: Path | None = None) -> None:
    """Let processes that this one starts, such as workers of loaders, put their sockets there.

    They would make a folder of their own, ``pymp-...``, which stays behind where they are killed.
    Without a folder a temporary one is made.
    """
    settings = process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in settings:
        return
    if folder is None:
        folder = _until_exit.enter_context(temporary_folder())
        atexit.register(_until_exit.close)
    if len(str(folder)) <= _LONGEST:
        settings["tempdir"] = str(folder)


_LARGEST = 2**63 - 1
"""Bytes of a tensor, as torch counts them; the widest entry has 16."""


class CorruptFileError(ValueError):
    """The content of a file is not what was written to it: it was truncated or changed.

    It is raised before a module or an optimizer has changed.

    Args:
        reason: what was found, as part of a sentence.
        source: what was read; a file is named by :func:`reading`.
    """

    def __init__(self, reason: str, source: str = "The saved state") -> None:
        super().__init__(reason, source)
        self.reason = reason
        self.source = source

    def __str__(self) -> str:
        return (
            f"{self.source} cannot be read: it is damaged, not whole, or of another kind "
            f"({self.reason}). Nothing was loaded. Copy it again from where it was written, or "
            "take an earlier one." + see("files")
        )


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """Raise a :class:`CorruptFileError` that names ``path`` for any exception but MemoryError.

    Which exceptions readers raise depends on the bytes of the file.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = error.reason if isinstance(error, CorruptFileError) else without_link(error)
        raise CorruptFileError(reason, f"'{path}'") from error


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Raise a :class:`CorruptFileError` for a missing entry, or one of another type.

    Errors of other kinds say themselves what does not fit, such as a shape.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptFileError(reason, f"The state of {what} in the checkpoint") from error


def stored_shape(value: Any, what: str) -> torch.Size:
    """Return a shape that a file declares; raise a :class:`CorruptFileError` if it is none.

    ``torch.Size`` takes any whole numbers, and its ``numel`` counts past 64 bits from the start.
    """
    sizes = tuple(value) if isinstance(value, list | tuple) else (repr(value),)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise CorruptFileError(f"{what} has the shape {shown(sizes)}")
    if 16 * prod(size for size in sizes if size) > _LARGEST:
        raise CorruptFileError(f"{what} has the shape {shown(sizes)}, which no memory holds")
    return torch.Size(sizes)
