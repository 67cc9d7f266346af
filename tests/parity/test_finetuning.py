"""A backbone that is unfrozen in mid-training, with checkpoints before and after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, difference, fit, loaded, trainer
from tests.ranks import run_ranks

UNFROZEN = 1


class Headed(Net):
    """Layers of both stages belong to the backbone, and one of each does not."""

    def __init__(self) -> None:
        super().__init__(outer=True)
        self.backbone = torch.nn.ModuleList([self.model[0], self.model[4]])
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def train(folder: Path, strategy: Any, ranks: int = 1, epoch: int | None = None) -> Record:
    L.seed_everything(0, verbose=False)
    callbacks = [
        BackboneFinetuning(UNFROZEN, lambda epoch: 1.5),
        ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
    ]
    run = trainer(
        strategy, ranks, callbacks=callbacks, enable_checkpointing=True, precision="64-true"
    )
    path = None if epoch is None else folder / f"epoch={epoch}.ckpt"
    return fit(run, Headed().double(), ckpt_path=path, weights_only=False)


def runs(folder: Path, strategy: Callable[[], Any], ranks: int = 1) -> list[Record]:
    """From the start, and from the checkpoints before and after the backbone is unfrozen."""
    return [train(folder, strategy(), ranks, epoch) for epoch in (None, 0, UNFROZEN)]


def on_ranks(folder: Path) -> list[Record]:
    return runs(folder, lambda: AxoSparseStrategy(2, 2, pipeline="model"), 2)


def test_a_backbone_is_unfrozen_and_resumed(tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    on_rank = run_ranks(2, on_ranks, ours)
    expected = runs(plain, lambda: "auto")
    assert [len(record.losses) for record in expected] == [18, 12, 6]
    for records in on_rank:
        for record, theirs in zip(records, expected, strict=True):
            assert difference(record, theirs) <= 1e-12
    for epoch in range(3):
        mine, theirs = loaded(*(folder / f"epoch={epoch}.ckpt" for folder in (ours, plain)))
        for here, there in zip(mine["optimizer_states"], theirs["optimizer_states"], strict=True):
            assert here["param_groups"] == there["param_groups"]
            torch.testing.assert_close(here["state"], there["state"], rtol=0, atol=1e-12)
        assert mine["callbacks"]["BackboneFinetuning"] == theirs["callbacks"]["BackboneFinetuning"]
