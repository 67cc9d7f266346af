"""Sockets of a rank's processes are in a folder that the next run removes; see also test_call."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import process, util
from pathlib import Path
from typing import Any

import pytest

from lightning_axosparse.support.files.temporary_folder import (
    keep_sockets_in,
    remove_orphans,
    temporary_folder,
)

FORK = multiprocessing.get_context("fork")


def child(connection: Any) -> None:
    connection.send((util.get_temp_dir(), os.getpid()))
    connection.recv()


def rank(folder: Path, connection: Any) -> None:
    """A process whose child, such as a worker of a loader, makes a socket."""
    tempfile.tempdir = str(folder)
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    keep_sockets_in()
    ours, theirs = FORK.Pipe()
    FORK.Process(target=child, args=[theirs], daemon=True).start()
    connection.send(ours.recv())
    connection.recv()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_no_folder_of_sockets_stays_behind_a_killed_rank(folder: Path) -> None:
    ours, theirs = FORK.Pipe()
    killed = FORK.Process(target=rank, args=[folder, theirs])
    killed.start()
    found, of_child = ours.recv()
    assert [str(path) for path in folder.iterdir()] == [found]
    remove_orphans(folder)
    assert Path(found).exists()
    for each in (killed.pid, of_child):
        os.kill(each, signal.SIGKILL)
    killed.join()
    remove_orphans(folder)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("length", [10, 120])
def test_names_of_sockets_are_not_too_long(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}
    monkeypatch.setattr(process.current_process(), "_config", settings)
    with temporary_folder() as folder:
        keep_sockets_in(folder / ("x" * length))
    assert ("tempdir" in settings) == (length == 10)
