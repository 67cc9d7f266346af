"""Makes temporary folders that the next process removes, if the one that made them was killed."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import process
from pathlib import Path

_PREFIX = "axosparse-"
LOCK = "lock"
"""The file in a folder that its process keeps locked."""

_LONGEST = 107 - len("/listener-12345678")
"""Characters of a folder in which sockets are made, whose paths may have 107."""


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


def keep_sockets_in(folder: Path | None = None) -> None:
    """Let processes that this one starts, such as workers of loaders, put their sockets there.

    They would make a folder of their own, ``pymp-...``, which stays behind where they are killed.

    Args:
        folder: that is removed when this process has ended; None for a new one.
    """
    settings = process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in settings:
        return
    if folder is None:
        stack = ExitStack()
        folder = stack.enter_context(temporary_folder())
        atexit.register(stack.close)
    if len(str(folder)) <= _LONGEST:
        settings["tempdir"] = str(folder)
