"""With ``restarts=N`` a call that loses a rank begins again, and ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.launcher.failure import RankFailedError
from tests.parity.cases import BATCHES, EPOCHS, Net, fit, trainer


class Fails(Callback):
    """Counts the attempts of a run in a folder; in the first of them something goes wrong."""

    def __init__(self, folder: Path, failing: int = 1) -> None:
        self.folder, self.failing = folder, failing

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1:
            (self.folder / f"attempt-{len(attempts(self.folder))}").touch()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        late = trainer.current_epoch == EPOCHS - 1 and trainer.global_step % BATCHES == 2
        if late and trainer.global_rank == 1 and len(attempts(self.folder)) <= self.failing:
            self.go_wrong()

    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(Fails):
    def go_wrong(self) -> None:
        raise ArithmeticError("would come again")


def attempts(folder: Path) -> list[Path]:
    return list(folder.glob("attempt-*"))


class Located(Net):
    """Has an object among its hyperparameters, which ``torch.load(weights_only=True)`` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"data": Path("data")})


def run(folder: Path, *callbacks: Callback, restarts: int = 1, **options: Any) -> Any:
    torch.manual_seed(3)
    strategy = AxoSparseStrategy(g_inter=2, restarts=restarts)
    run = trainer(strategy, 2, callbacks=[*callbacks], default_root_dir=folder, **options)
    return run, fit(run, Located())


def saving(folder: Path) -> dict[str, Any]:
    """A checkpoint after each epoch, in the folder of a logger, which ranks find."""
    return {"logger": CSVLogger(folder), "enable_checkpointing": True}


def test_a_run_that_loses_a_rank_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    def best() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="val_loss", save_top_k=-1)

    _, expected = run(tmp_path, best(), **saving(tmp_path / "undisturbed"))
    disturbed = tmp_path / "disturbed"
    with pytest.warns(UserWarning, match=r"rank 1 .*was killed by SIGKILL") as warned:
        done, record = run(tmp_path, Fails(tmp_path), best(), **saving(disturbed))
    words = "".join(str(warning.message) for warning in warned)
    folder = disturbed / "lightning_logs" / "version_0" / "checkpoints"
    newest = folder / f"epoch={EPOCHS - 2}-step={BATCHES * (EPOCHS - 1)}.ckpt"
    assert f"Restart 1 of 1: from '{newest}'." in words
    assert record.losses == expected.losses[-BATCHES:]
    # Of the epoch before, it has not logged anything.
    assert record.validated[0].items() <= expected.validated[-1].items()
    assert record.facts == expected.facts
    assert all(torch.equal(record.weights[name], expected.weights[name]) for name in record.weights)
    # Its callbacks go on in the same folder, and know what was saved before.
    assert len(list(folder.iterdir())) == EPOCHS
    assert len(done.checkpoint_callback.best_k_models) == EPOCHS
    assert len(attempts(tmp_path)) == 2


def test_a_run_begins_again_from_the_newest_whole_checkpoint_or_its_start(tmp_path: Path) -> None:
    class Damages(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            newest = tmp_path / f"epoch={EPOCHS - 2}.ckpt"
            if trainer.current_epoch == EPOCHS - 1 and trainer.global_rank == 0:
                newest.write_bytes(newest.read_bytes()[:-100])

    every = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    with (
        pytest.warns(UserWarning, match=r"Restart 1 of 1: from '.*epoch=0.ckpt'") as warned,
        pytest.raises(RankFailedError, match=r"rank 1 .*was killed by SIGKILL"),
    ):
        run(tmp_path, Fails(tmp_path, failing=2), Damages(), every, enable_checkpointing=True)
    assert not [warning for warning in warned if "Restart 2" in str(warning.message)]
    assert len(attempts(tmp_path)) == 2


def test_a_run_that_has_saved_nothing_since_begins_again_from_the_same(tmp_path: Path) -> None:
    class FailsSoon(Fails):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_rank == 1 and len(attempts(self.folder)) == 2:
                self.go_wrong()
            super().on_train_batch_end(trainer, *arguments)

    every = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    with pytest.warns(UserWarning, match=r"Restart 2 of 2: from '.*epoch=1.ckpt'"):
        _, record = run(tmp_path, FailsSoon(tmp_path), every, restarts=2, enable_checkpointing=True)
    assert len(record.losses) == BATCHES
    assert len(attempts(tmp_path)) == 3


def test_only_a_lost_rank_lets_a_run_begin_again(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="would come again"):
        run(tmp_path, Raises(tmp_path), restarts=3)
    assert len(attempts(tmp_path)) == 1
    with pytest.warns(UserWarning, match="Restart 1 of 1: from where it had begun"):
        _, record = run(tmp_path, Fails(tmp_path, failing=2))
    assert len(record.losses) == BATCHES * EPOCHS
