"""A training of seconds that saves every epoch, in which one rank may go wrong.

python -m benchmarks.faults.job FOLDER [FAULT RANK STEP]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy

EPOCHS, BATCHES, BATCH, WIDTH = 12, 6, 8, 16


class Net(L.LightningModule):
    """Four layers that learn a sum."""

    def __init__(self) -> None:
        super().__init__()
        linear = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.model = nn.Sequential(*linear, nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The error of the sum."""
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> Any:
        """AdamW, whose state has to be resumed, too."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Disturbed(Callback):
    """Says when training is under way, takes its time, and goes wrong if it is told to.

    Args:
        folder: for a file of each rank, with its process ID.
        fault: "exit 0", "exit 3", "exception" or "" for none.
        rank: the rank that goes wrong.
        step: the optimizer step before which it does.
        seconds: that each step takes at least.
    """

    def __init__(self, folder: Path, fault: str, rank: int, step: int, seconds: float) -> None:
        self.folder, self.fault, self.rank, self.step = folder, fault, rank, step
        self.seconds = seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Go wrong, or wait."""
        name = f"rank-{trainer.global_rank}"
        (self.folder / f"{name}.new").write_text(str(os.getpid()))
        (self.folder / f"{name}.new").rename(self.folder / name)
        time.sleep(self.seconds)
        if (trainer.global_rank, trainer.global_step) != (self.rank, self.step):
            return
        (self.folder / "fault").touch()
        if self.fault == "exception":
            raise ArithmeticError("of the user's code")
        if self.fault:
            os._exit(int(self.fault.removeprefix("exit ")))


def train(
    folder: Path,
    ranks: int,
    disturbed: Disturbed | None = None,
    resume: Path | None = None,
    **options: Any,
) -> None:
    """Train, and leave ``last.ckpt`` in the folder."""
    L.seed_everything(1, verbose=False)
    module = Net()
    x = torch.randn(BATCHES * BATCH, WIDTH)
    trainer = L.Trainer(
        strategy=AxoSparseStrategy(2, microbatches=2, **options),
        accelerator="cpu",
        devices=ranks,
        max_epochs=EPOCHS,
        callbacks=[
            ModelCheckpoint(folder, "last", enable_version_counter=False),
            *([disturbed] if disturbed else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)
    trainer.fit(module, data, ckpt_path=resume)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    fault, rank, step = (*sys.argv[2:], "", "-1", "-1")[:3]
    train(place, 2, Disturbed(place, fault, int(rank), int(step), 0.05))
