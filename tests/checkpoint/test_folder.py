"""Folders to which all stages write: whole or not at all, and readable by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy, CorruptFileError, EarlyBirdTicket
from lightning_axosparse.checkpoint import folder as folders
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.consolidate import consolidate
from lightning_axosparse.checkpoint.folder import FolderWriter
from lightning_axosparse.checkpoint.gather import StageTensors
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import DeferredTensor, all_made
from lightning_axosparse.support.files import clear_partials
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks


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
    from lightning_axosparse.support import files as atomic_file

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


class Late(Callback):
    """Lets a thread write when another batch has changed the weights, or at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.may_write = folder, threading.Semaphore(0)
        self.seen: list[set[str]] = []

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, at: int) -> None:
        if at == 1 and run.current_epoch > 0:
            self.seen.append({path.name for path in self.folder.glob("step*")})
            self.may_write.release()

    def on_train_end(self, *_: Any) -> None:
        self.may_write.release()

    def write(self, write: Any, original: Any = folders._Write.write) -> Any:
        assert self.may_write.acquire(timeout=60)
        return original(write)


def train(folder: Path, keep: int, *plugins: Any, **options: Any) -> list[set[str]]:
    """Train for three epochs with a draw after the first, and save after each."""
    late = Late(folder)
    is_late = bool(plugins) and "regrid" not in options
    write = late.write if is_late else folders._Write.write
    ticket = EarlyBirdTicket(0.6, method="early-bird", every="1 epoch", draw_by="1 epochs")
    run = trainer(
        AxoSparseStrategy(**options, microbatches=2, save_distributed_checkpoint=True),
        1 if options.get("transport") == "loopback" else 2,
        callbacks=[ticket, late, ModelCheckpoint(folder, "{step}", save_top_k=keep)],
        enable_checkpointing=True,
        max_epochs=3,
        plugins=[*plugins],
    )
    L.seed_everything(0, verbose=False)
    with patch.object(folders._Write, "write", lambda each: write(each)):
        run.fit(Net(), loader(1, batches=2))
    return late.seen


def save_on_ranks(path: Path, fails: bool, in_background: bool) -> str:
    """Write a folder of the job's ranks, the second of which may fail; the error of this rank."""

    def made() -> Tensor:
        if fails and rank == 1:
            raise OSError("no space left for it")
        return torch.full((400,), float(rank))

    tensors, rank = StageTensors(lambda: dist.group.WORLD), dist.get_rank()
    parts = tensors.gather({str(rank): DeferredTensor(str(rank), (400,), torch.float32, made)})
    writer = FolderWriter(tensors, in_background)
    try:
        writer.save({name: value for part in parts for name, value in part.items()}, path)
        writer.wait()
    except OSError as error:
        return str(error)
    return ""


def two_ranks(folder: Path) -> dict[str, Any]:
    seen = {
        "at once": train(folder / "at once", -1, g_inter=2),
        "threads": train(folder / "threads", -1, AsyncCheckpointIO(), g_inter=2),
        "best": train(folder / "best", 1, AsyncCheckpointIO(), g_inter=2),
        "regrid": train(folder / "regrid", -1, AsyncCheckpointIO(), g_inter=2, regrid=1),
    }
    errors = [
        save_on_ranks(folder / f"error {in_background}", fails, in_background)
        for in_background in (False, True)
        for fails in (False, True)
    ]
    return {"seen": seen, "errors": errors}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def facts(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, two_ranks, folder)


NAMES = ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


def test_what_threads_write_later_is_what_was_there_when_they_were_asked(
    facts: Any, folder: Path
) -> None:
    for name in NAMES:
        one, other = (
            torch.load(consolidate(folder / way / name, folder / f"{way} {name}"))
            for way in ("at once", "threads")
        )
        for part in ("state_dict", "optimizer_states", "loops"):
            torch.testing.assert_close(other[part], one[part], rtol=0, atol=0)
    for way in ("at once", "threads", "regrid"):
        assert sorted(path.name for path in (folder / way).iterdir()) == NAMES


def test_older_folders_stay_until_the_next_one_is_written(facts: Any, folder: Path) -> None:
    for rank in facts:
        assert rank["seen"]["at once"] == [{*NAMES[:1]}, {*NAMES[:2]}]
        assert rank["seen"]["threads"] == [set(), {*NAMES[:1]}]
        assert rank["seen"]["best"] == [set(), {*NAMES[:1]}]
    assert [path.name for path in (folder / "best").iterdir()] == NAMES[2:]


def test_a_folder_has_a_file_of_each_stage(facts: Any, folder: Path) -> None:
    for way in ("at once", "threads", "regrid"):
        for path in (folder / way).iterdir():
            files = {file.name for file in path.iterdir()}
            assert {"meta.pt", "stage-0.pt"} <= files <= {"meta.pt", "stage-0.pt", "stage-1.pt"}
            assert "stage-1.pt" in files or way == "regrid"


def test_an_error_of_a_stage_is_raised_on_all(facts: Any, folder: Path) -> None:
    for rank in facts:
        at_once, threads = rank["errors"][:2], rank["errors"][2:]
        for written, failed in (at_once, threads):
            assert written == ""
            assert "was not written: stage 1: no space left for it. An older" in failed
    for in_background in (False, True):
        path = folder / f"error {in_background}"
        whole = AtomicCheckpointIO().load_checkpoint(path)
        assert [int(whole[str(rank)].unique()) for rank in (0, 1)] == [0, 1]
    assert not [*folder.glob(".*")]


def test_the_first_stage_puts_the_folder_in_its_place_without_being_told(tmp_path: Path) -> None:
    first, second = (
        folders._Write(tmp_path / "a", tmp_path, stage, 2, {}, folders.ExitStack())
        for stage in (0, 1)
    )
    thread = threading.Thread(target=first.in_background)
    thread.start()
    assert first.written.result(60) is None
    assert not first.in_place.done()
    second.in_background()
    thread.join(60)
    assert first.in_place.result(0) is None
    assert {path.name for path in tmp_path.iterdir()} == {"stage-0.pt", "stage-1.pt"}


def test_an_error_of_a_thread_ends_a_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(write: Any) -> Any:
        return "stage 0: no space left for it"

    monkeypatch.setattr(Late, "write", lambda late, write: fail(write))
    with pytest.raises(OSError, match=r"step=2.ckpt' was not written: .*no space left for it"):
        train(tmp_path, 1, AsyncCheckpointIO(), g_inter=2, transport="loopback")
    assert not [*tmp_path.iterdir()]
