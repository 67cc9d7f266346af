"""Writes files and folders atomically, detects damaged ones, and creates temporary folders.

A partial file or folder is written, and replaces the older one when it is complete. If the disk is
full, or the job is killed, the older one is unchanged.
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

from lightning_axosparse.support.arguments import short_repr
from lightning_axosparse.support.troubleshooting import see, without_link

_DIGITS = 12
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_PREFIX = "axosparse-"
LOCK = "lock"
"""The file in a temporary folder that is locked as long as its process runs."""
_RANDOM = "12345678"
"""As many characters as ``tempfile`` adds to a name."""
_MAX_SOCKET_FOLDER = 107 - len("/listener-12345678")
"""Characters of a folder for sockets, whose paths may have 107."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a partial file beside ``path``; rename it to ``path`` if the context ends normally.

    Content and name are then on the disk (``fsync``). Folders that do not exist are created, and
    partial files of the same ``path`` whose writers were killed are removed first.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(
            f"'{target}' is a folder, perhaps a sharded checkpoint, so no file of that name can be "
            "written. Move it away, or choose another name." + see("files")
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_partials(target.parent, target.name)
    partial = _partial_path(target)
    try:
        with partial.open("xb") as file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(target.parent).free
        raise OSError(
            error.errno,
            f"'{target}' was not written: {error.strerror} ({free / 1e6:.1f} MB are free there). "
            "An older file of that name is as it was. Make room, or write elsewhere."
            + see("files"),
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(target.parent)


@contextmanager
def creating_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a partial folder beside ``path``; rename it to ``path`` if the context ends normally.

    There must be nothing at ``path``, which a killed writer so leaves as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_partials(target.parent, target.name)
    partial = _partial_path(target)
    partial.mkdir()
    handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle)
        yield partial
        partial.rename(target)
        _sync_folder(target.parent)
    finally:
        os.close(handle)
        _remove(partial)


def clear_partials(folder: str | Path, name: str | None = None) -> None:
    """Remove partial files whose writer has ended, on any host; of ``name``, or of all names."""
    pattern = "*" if name is None else escape(_shortened(name))
    for partial in Path(folder).glob(f".{pattern}.{'[0-9a-f]' * _DIGITS}.partial"):
        if _writer_has_ended(partial):
            _remove(partial)


def _partial_path(target: Path) -> Path:
    return target.with_name(f".{_shortened(target.name)}.{uuid4().hex[:_DIGITS]}.partial")


def _shortened(name: str) -> str:
    """Return the start of a name, so that the name of the partial file is not too long."""
    return name[:50]


def _lock(file: int) -> None:
    """Lock a file or folder until this process ends; other hosts see the lock, too."""
    with suppress(OSError):  # On a file system without locks, no partial file is removed.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _writer_has_ended(partial: Path) -> bool:
    try:
        file = os.open(partial, os.O_RDONLY if partial.is_dir() else os.O_RDWR)
    except OSError:  # It is already removed, or not writable.
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # Its writer has locked it.
        return False
    finally:
        os.close(file)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Write the names in ``folder`` to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # Some network file systems do not support it.
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder with a locked file in it; remove both at the end of the context.

    The operating system unlocks the file when this process ends, also if it is killed. Folders of
    killed processes are removed first.
    """
    remove_orphans(Path(tempfile.gettempdir()))
    prefix = _temporary_name().name.removesuffix(_RANDOM)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
        folder = Path(path)
        unlocked = folder / "unlocked"
        with unlocked.open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            # Renamed once it is locked, as other processes remove folders with an unlocked file.
            unlocked.rename(folder / LOCK)
            yield folder


def _temporary_name() -> Path:
    """Return the path of a temporary folder of this process, up to its random end."""
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}-{_RANDOM}"


def remove_orphans(folder: Path) -> None:
    """Remove this user's temporary folders in ``folder`` whose process has ended.

    Folders of this process are skipped, as opening and closing their file would unlock it.
    """
    for path in folder.glob(f"{_PREFIX}*-*"):
        try:
            is_own = path.name.startswith(f"{_PREFIX}{os.getpid()}-")
            if is_own or path.lstat().st_uid != os.getuid():
                continue
            with (path / LOCK).open("r+") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # The process still runs, or the folder is already removed.
            continue


_until_exit = ExitStack()
"""Contexts that end when this process exits. A reference here keeps them open in forked children,
which from Python 3.14 on drop functions registered with ``atexit``: the context of the folder would
end, and the folder be removed."""


def put_sockets_in(folder: Path | None = None) -> None:
    """Let child processes, such as workers of loaders, put their sockets into a folder.

    Otherwise each creates a folder ``pymp-...``, which is not removed if the process is killed.

    Args:
        folder: the folder; None: a temporary one.
    """
    settings = process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in settings or len(str(folder or _temporary_name())) > _MAX_SOCKET_FOLDER:
        return
    if folder is None:
        folder = _until_exit.enter_context(temporary_folder())
        atexit.register(_until_exit.close)
    settings["tempdir"] = str(folder)


_LARGEST = 2**63 - 1
"""Bytes of a tensor that torch can count; the largest dtype has 16 bytes per entry."""


class CorruptFileError(ValueError):
    """A file was truncated, or changed after it was written.

    It is raised before a module or an optimizer has changed.

    Args:
        reason: the damage, as part of a sentence.
        source: the file or state that was read; :func:`reading` sets it to the file.
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


def require_file(path: str | PathLike[str]) -> None:
    """Check that there is a file at a path.

    Raises:
        FileNotFoundError: if there is none.
        IsADirectoryError: if a folder is there.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(
            f"'{path}' is a folder. Of a checkpoint that all stages have written, make one file: "
            "python -m lightning_axosparse.checkpoint.consolidate FOLDER" + see("files")
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file '{path}'." + see("files"))


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """Raise a :class:`CorruptFileError` that names ``path`` for any exception but MemoryError.

    A damaged file may raise any exception in a function that reads it.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = error.reason if isinstance(error, CorruptFileError) else without_link(error)
        raise CorruptFileError(reason, f"'{path}'") from error


@contextmanager
def restoring(owner: str) -> Iterator[None]:
    """Raise a :class:`CorruptFileError` for a missing entry of a state, or one of another type.

    Other exceptions are not changed, as their messages say what does not fit, such as a shape.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptFileError(reason, f"The state of {owner} in the checkpoint") from error


def stored_shape(value: Any, name: str) -> torch.Size:
    """Return the shape of a tensor that is stored in a file.

    ``torch.Size`` accepts any integers, and its ``numel`` wraps around beyond 64 bits.

    Raises:
        CorruptFileError: if it is no valid shape.
    """
    sizes = tuple(value) if isinstance(value, list | tuple) else (repr(value),)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise CorruptFileError(f"{name} has the shape {short_repr(sizes)}")
    if 16 * prod(size for size in sizes if size) > _LARGEST:
        raise CorruptFileError(f"{name} has the shape {short_repr(sizes)}, which no memory holds")
    return torch.Size(sizes)
