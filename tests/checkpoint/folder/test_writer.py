"""Folders that stages write in threads: of the values they had, whole, and with errors raised."""

from __future__ import annotations

import threading
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

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.consolidate import consolidate
from lightning_axosparse.checkpoint.folder import writer as folder_writer
from lightning_axosparse.checkpoint.folder.stage_tensors import StageTensors
from lightning_axosparse.checkpoint.folder.writer import FolderWriter
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks


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

    def write(self, write: Any, original: Any = folder_writer._Write.write) -> Any:
        assert self.may_write.acquire(timeout=60)
        return original(write)


def train(folder: Path, keep: int, *plugins: Any, **options: Any) -> list[set[str]]:
    """Train for three epochs with a draw after the first, and save after each."""
    late = Late(folder)
    is_late = bool(plugins) and "regrid" not in options
    write = late.write if is_late else folder_writer._Write.write
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
    with patch.object(folder_writer._Write, "write", lambda each: write(each)):
        run.fit(Net(), loader(1, batches=2))
    return late.seen


def save(path: Path, fails: bool, in_background: bool) -> str:
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
        save(folder / f"error {in_background}", fails, in_background)
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
        folder_writer._Write(tmp_path / "a", tmp_path, stage, 2, {}, folder_writer.ExitStack())
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
