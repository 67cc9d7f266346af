"""A job that dies, or a disk that is full, during a write leaves the older file unchanged."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy, Ticket, save_safetensors
from lightning_axosparse.strategy.launcher.failure import RankFailedError
from lightning_axosparse.support import archive
from tests.parity.cases import BATCHES, Net, fit, loader, trainer


class Large(Net):
    """A model whose checkpoint has 400 kB and more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(100_000))


def saving(folder: Path) -> ModelCheckpoint:
    """One that writes ``last.ckpt`` anew after every epoch."""
    return ModelCheckpoint(folder, "last", enable_version_counter=False)


class KilledInWrite(Callback):
    """Rank 0 is killed when it has written so many bytes of its second checkpoint."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch != 1 or trainer.global_rank > 0:
            return
        replacing = archive.replacing

        @contextmanager
        def replacing_and_dying(path: Any) -> Iterator[Any]:
            with replacing(path) as file:
                write = file.write

                def write_and_die(data: Any) -> int:
                    written = write(data)
                    if len(data) > 100_000:
                        file.flush()
                        os.kill(os.getpid(), signal.SIGKILL)
                    return written

                file.write = write_and_die  # type: ignore[method-assign]
                yield file

        archive.replacing = replacing_and_dying  # type: ignore[attr-defined]


class KilledInFolder(Callback):
    """Rank 1 is killed where it would write its part of the second checkpoint."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            archive.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore


def partials(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith(".partial")]


def test_a_rank_killed_during_a_write(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    run = trainer(
        AxoSparseStrategy(g_inter=2),
        2,
        callbacks=[KilledInWrite(), saving(tmp_path)],
        enable_checkpointing=True,
    )
    with pytest.raises(RankFailedError):
        run.fit(Large(), loader(1))
    assert torch.load(last, weights_only=False)["global_step"] == BATCHES
    assert [path.stat().st_size > 100_000 for path in partials(tmp_path)] == [True]
    run = trainer(AxoSparseStrategy(), callbacks=[saving(tmp_path)], enable_checkpointing=True)
    record = fit(run, Large(), ckpt_path=last, weights_only=False)
    assert len(record.losses) == 2 * BATCHES
    assert list(tmp_path.iterdir()) == [last]


def test_a_rank_killed_while_stages_write_a_folder(tmp_path: Path) -> None:
    def saves(epochs: int, *callbacks: Callback) -> Any:
        best = ModelCheckpoint(tmp_path, "{epoch}", enable_version_counter=False)
        return trainer(
            AxoSparseStrategy(g_inter=2, save_distributed_checkpoint=True),
            2,
            callbacks=[*callbacks, best],
            enable_checkpointing=True,
            max_epochs=epochs,
        )

    first = tmp_path / "epoch=0.ckpt"
    with pytest.raises(RankFailedError):
        saves(3, KilledInFolder()).fit(Large(), loader(1))
    assert {*tmp_path.iterdir()} == {first, *partials(tmp_path)}
    assert len(partials(tmp_path)) == 1
    saves(2).fit(Large(), loader(1), ckpt_path=first, weights_only=False)
    assert {*tmp_path.iterdir()} == {first, tmp_path / "epoch=1.ckpt"}


@pytest.fixture(params=["full disk", "limited size"])
def disk(request: Any, tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder, and what makes no more than 100 kB fit into a new file there."""
    if request.param == "limited size":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"may not mount a small disk: {mounted.stderr.strip()}")

    def fill() -> None:
        statistics = os.statvfs(tmp_path)
        free = statistics.f_bavail * statistics.f_frsize
        (tmp_path / "filler").write_bytes(bytes(free - 100_000))

    yield tmp_path, fill
    subprocess.run(["umount", str(tmp_path)], check=True)


class Fills(Callback):
    """Calls ``fill`` before the second epoch."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self.fill = fill

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.fill()


def test_a_full_disk(disk: tuple[Path, Callable[[], None]]) -> None:
    folder, fill = disk
    model = Large()
    ticket = Ticket({"a.weight": torch.ones(1000, 1000, dtype=torch.bool)}, 0.5)
    ticket.save(folder / "a.ticket")
    save_safetensors(model, folder / "a.safetensors")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    run = trainer(
        AxoSparseStrategy(), callbacks=[Fills(fill), saving(folder)], enable_checkpointing=True
    )
    with pytest.raises(OSError, match=r"last.ckpt' was not written.*MB are free.*as it was"):
        fit(run, model)
    for path, write in (
        ("a.ticket", ticket.save),
        ("a.safetensors", lambda path: save_safetensors(model, path)),
    ):
        with pytest.raises(OSError, match=f"{path}' was not written"):
            write(folder / path)
    assert torch.load(folder / "last.ckpt", weights_only=False)["global_step"] == BATCHES
    assert {path: path.read_bytes() for path in before} == before
    assert not partials(folder)
