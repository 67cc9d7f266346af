"""Folders to which all stages write: whole or not at all, and readable by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_axosparse import CorruptFileError
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.consolidate import consolidate
from lightning_axosparse.checkpoint.folder.stage_tensors import StageTensors
from lightning_axosparse.checkpoint.folder.writer import FolderWriter
from lightning_axosparse.support.files import archive
from lightning_axosparse.support.files.atomic_file import clear_partials
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, all_made


def checkpoint(step: int) -> dict[str, Any]:
    values = torch.full((3, 200), float(step))
    weight = DeferredTensor("state_dict.a", values.shape, values.dtype, partial(_same, values))
    return {"state_dict": {"a": weight, "tied": weight, "b": torch.tensor(step)}, "step": step}


def _same(values: Tensor) -> Tensor:
    return values


def save(step: int, path: Path, in_thread: bool = False) -> None:
    writer = FolderWriter(StageTensors(lambda: None), in_thread)
    writer.save(checkpoint(step), path)
    writer.wait()


def load(path: Path) -> int:
    """The step of a checkpoint, all of whose values are of that step."""
    whole = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    step = int(whole["step"])
    assert whole["state_dict"]["a"].eq(step).all()
    assert whole["state_dict"]["tied"] is whole["state_dict"]["a"]
    assert whole["state_dict"]["b"] == step
    return step


def test_one_file_of_it_is_the_one_that_is_written_otherwise(tmp_path: Path) -> None:
    save(7, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt") == 7
    archive.save(all_made(checkpoint(7)), tmp_path / "plain.ckpt")
    assert consolidate(tmp_path / "a.ckpt") == tmp_path / "a.ckpt.consolidated"
    module = "lightning_axosparse.checkpoint.consolidate"
    command = [sys.executable, "-m", module, str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]
    subprocess.run(command, check=True, capture_output=True)
    plain = torch.load(tmp_path / "plain.ckpt")
    for name in ("a.ckpt.consolidated", "b.ckpt"):
        torch.testing.assert_close(torch.load(tmp_path / name), plain, rtol=0, atol=0)
        assert (tmp_path / name).stat().st_size == (tmp_path / "plain.ckpt").stat().st_size
    with pytest.raises(NotADirectoryError, match=r"b.ckpt' is no folder"):
        consolidate(tmp_path / "b.ckpt")


def killed_at(event: int, step: int, path: Path, in_thread: bool) -> bool:
    """Save in a child process that is killed at its n-th system event; whether it was."""
    child = os.fork()
    if child == 0:
        left = event

        def count(name: str, arguments: Any) -> None:
            nonlocal left
            if name.startswith(("open", "os.", "shutil.", "ctypes.", "fcntl.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save(step, path, in_thread)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path, in_thread: bool) -> None:
    path, event, found = tmp_path / "last.ckpt", 1, []
    save(0, path)
    while killed_at(event, event, path, in_thread):
        found.append(load(path))
        event += 1
    assert load(path) == event, "the last one was not killed"
    assert {0, event - 1} <= {*found}, "some were killed before the new one took the place"
    assert all(step in (event_, earlier) for event_, earlier, step in _with_earlier(found))
    clear_partials(tmp_path)
    assert [*tmp_path.iterdir()] == [path]


def _with_earlier(found: list[int]) -> list[tuple[int, int, int]]:
    """Of each kill: the step that was being written, the one that was there before, what is."""
    return [(n + 1, ([0, *found])[n], step) for n, step in enumerate(found)]


def test_it_takes_the_place_of_a_file_and_of_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    file.write_text("older")
    save(1, file)
    link.symlink_to(file.name)
    assert load(link) == 1
    save(2, link)
    assert (load(link), load(file), link.is_symlink()) == (2, 1, False)
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "last.ckpt"}


def test_it_works_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_axosparse.support.files import atomic_file

    monkeypatch.setattr(atomic_file, "_exchanged", lambda one, other: False)
    for step in (1, 2):
        save(step, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


FILES = ["meta.pt", "stage-0.pt"]


def change_one_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(b"state_dict")] ^= 1
    file.write_bytes(data)


def end_early(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def link_away(file: Path) -> None:
    os.replace(file, file.parent.parent / file.name)
    file.symlink_to(file.parent.parent / file.name)


def take_that_of_another(file: Path) -> None:
    save(2, file.parent.parent / "b.ckpt")
    os.replace(file.parent.parent / "b.ckpt" / file.name, file)


@pytest.mark.parametrize(
    "damage", [change_one_byte, end_early, link_away, take_that_of_another, Path.unlink]
)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_refused(tmp_path: Path, name: str, damage: Any) -> None:
    path = tmp_path / "a.ckpt"
    save(1, path)
    assert {file.name for file in path.iterdir()} == {*FILES}
    damage(path / name)
    with pytest.raises(CorruptFileError, match=r"a\.ckpt.*cannot be read"):
        load(path)


def test_a_tensor_that_no_stage_has_written_is_named(tmp_path: Path) -> None:
    save(1, tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt" / FILES[1])
    archive.save({**content, "state_dict": {}}, tmp_path / "a.ckpt" / FILES[1])
    with pytest.raises(CorruptFileError, match=r"a.ckpt' .*has no tensor 'state_dict.a'"):
        load(tmp_path / "a.ckpt")


def test_how_to_take_a_folder_of_another_strategy_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "a.ckpt" / "meta.pt").touch()
    with pytest.raises(CorruptFileError, match=r"utilities.consolidate_checkpoint FOLDER"):
        load(tmp_path / "a.ckpt")
