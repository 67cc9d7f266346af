"""Tells local paths from URLs of other file systems, such as ``s3://``, and copies from these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from lightning_axosparse.support.files import temporary_folder


def local_path(path: Any) -> Path | None:
    """Return ``path``, or the path of a ``file://`` URL, if it is in the local file system."""
    if get_protocol(str(path)) != "file":
        return None
    return Path(url_to_fs(str(path))[1])


def is_web_page(path: Any) -> bool:
    """Return whether ``path`` is the address of a file that Lightning downloads."""
    return get_protocol(str(path)) in ("http", "https")


def exists(path: Any) -> bool:
    """Return whether there is a file or a folder at a path or URL, other than a web page."""
    if is_web_page(path):
        return False
    file_system, name = url_to_fs(str(path))
    return bool(file_system.exists(name))


@contextmanager
def local_copy(path: Any) -> Iterator[Path]:
    """Copy a file or folder from another file system to a temporary folder inside the context.

    What is mapped from the copy stays in memory after the context.
    """
    file_system, name = url_to_fs(str(path))
    with temporary_folder() as folder:
        copy = folder / "copy"
        file_system.get(name, str(copy), recursive=True)
        yield copy
