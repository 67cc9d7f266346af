"""A file that cannot be written again is not lost; no folder of a killed process stays."""

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
import torch
from torch import nn

from lightning_axosparse import Ticket, save_safetensors, sparsify
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support.files import (
    clear_partials,
    put_sockets_in,
    remove_orphans,
    replacing,
    temporary_folder,
)


def test_a_file_exists_only_when_it_is_complete(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with replacing(str(tmp_path / "file")) as partial:
            partial.write(content.encode())
        assert (tmp_path / "file").read_text() == content
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_weights_that_cannot_be_written_leave_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    model, path = nn.Sequential(nn.Linear(4, 4)), tmp_path / "model.safetensors"
    sparsify(model, {"0.weight": torch.eye(4).bool()})
    save_safetensors(model, path, sparse=False)
    before = path.read_bytes()
    monkeypatch.setattr(SparseWeight, "dense", full)
    with pytest.raises(OSError, match="no space"):
        save_safetensors(model, path, sparse=False)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_ticket_that_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(content: Any, file: Any, **others: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    ticket = Ticket({"a.weight": torch.eye(3).bool()}, 0.6)
    ticket.save(tmp_path / "a.ticket")
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        ticket.save(tmp_path / "a.ticket")
    assert Ticket.load(tmp_path / "a.ticket") == ticket
    assert [file.name for file in tmp_path.iterdir()] == ["a.ticket"]


def test_only_files_without_a_writer_are_cleared(tmp_path: Path) -> None:
    leftover, others = tmp_path / ".a.ckpt.0123456789ab.partial", tmp_path / ".a.ckpt.partial"
    for file in (leftover, others):
        file.touch()
    clear_partials(tmp_path, "b.ckpt")
    assert leftover.exists()
    with replacing(tmp_path / "a.ckpt") as file:
        assert not leftover.exists()
        clear_partials(tmp_path)
        file.write(b"whole")
    assert (tmp_path / "a.ckpt").read_bytes() == b"whole"
    leftover.touch()
    clear_partials(tmp_path)
    clear_partials(tmp_path / "nowhere")
    assert {file.name for file in tmp_path.iterdir()} == {others.name, "a.ckpt"}


def test_a_name_may_be_as_long_as_the_file_system_has_them(tmp_path: Path) -> None:
    path = tmp_path / ("[x]" + "é" * 126)
    for content in (b"old", b"new"):
        with replacing(path) as file:
            file.write(content)
    assert path.read_bytes() == b"new"


FORK = multiprocessing.get_context("fork")


def child(connection: Any) -> None:
    connection.send((util.get_temp_dir(), os.getpid()))
    connection.recv()


def rank(folder: Path, connection: Any) -> None:
    """A process whose child, such as a worker of a loader, makes a socket."""
    tempfile.tempdir = str(folder)
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    put_sockets_in()
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
        put_sockets_in(folder / ("x" * length))
    assert ("tempdir" in settings) == (length == 10)


def test_a_folder_with_too_long_a_name_for_sockets_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}
    monkeypatch.setattr(process.current_process(), "_config", settings)
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    put_sockets_in()
    assert not settings
    assert not [*folder.iterdir()]
