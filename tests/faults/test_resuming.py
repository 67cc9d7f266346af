"""A job that has lost a rank goes on from its last checkpoint, and ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy, RankFailedError
from tests.parity.cases import BATCHES, EPOCHS, Net, Record, fit, trainer


class Killed(Callback):
    """Kills a rank in the middle of the last epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = BATCHES * (EPOCHS - 1) + 2
        if (trainer.global_rank, trainer.global_step) == (1, step):
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, *callbacks: Callback) -> Record:
    """What a job script runs, the first time and again."""
    torch.manual_seed(3)
    saves = ModelCheckpoint(folder, save_last=True)
    job = trainer(
        AxoSparseStrategy(g_inter=2), 2, callbacks=[*callbacks, saves], enable_checkpointing=True
    )
    return fit(job, Net(), ckpt_path="last")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_a_job_goes_on_from_its_last_checkpoint_to_the_bit(tmp_path: Path) -> None:
    expected = run(tmp_path / "undisturbed")
    with pytest.raises(RankFailedError, match=r"rank 1 .*was killed by SIGKILL"):
        run(tmp_path / "disturbed", Killed())
    record = run(tmp_path / "disturbed")
    assert record.losses == expected.losses[-BATCHES:]
    assert record.facts == expected.facts
    assert all(torch.equal(record.weights[name], expected.weights[name]) for name in record.weights)
