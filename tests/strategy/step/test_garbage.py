"""Batches leave no cycles of objects, which would hold activations until a garbage collection."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

WIDTH = 4


class Layer(nn.Module):
    """Counts its calls, and stores a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        self.penalty = x.square().mean()
        return self.linear(x).relu() * mask


class Module(L.LightningModule):
    """Has a skip connection, noise before, between and behind the layers, and a dict as a batch."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.noise = 0.1 * noise
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.losses: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        first = nn.functional.dropout(x, self.noise, self.training)
        mask = torch.ones_like(x)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x, mask=mask), self.noise, self.training) + first
        return x

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        outputs = self(batch["x"])
        loss = outputs.square().mean() + sum(layer.penalty for layer in self.layers)
        self.losses.append(batch_idx)
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "outputs": outputs.detach()}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("validated", self(batch["x"]).mean(), sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Garbage(Callback):
    """Counts the tensors, and the objects of this package, that were left in cycles."""

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:  # The first batch may have to run again.
            self.on_predict_start()

    def on_predict_start(self, *_: Any) -> None:
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)

    def on_train_end(self, *_: Any) -> None:
        gc.collect()
        gc.set_debug(0)
        kinds = (type(each) for each in gc.garbage)
        ours = (k for k in kinds if k.__module__.startswith(("torch", "lightning_axosparse")))
        self.left.update(kind.__qualname__ for kind in ours)
        gc.garbage.clear()

    on_predict_end = on_train_end


def left(grid: dict[str, Any], ranks: int, noise: bool) -> Counter[str]:
    samples = [{"x": torch.full((WIDTH,), float(n)), "name": str(n)} for n in range(12)]
    callback, data = Garbage(), DataLoader(samples, 4)  # type: ignore[arg-type]
    strategy = AxoSparseStrategy(**grid)
    run = L.Trainer(strategy=strategy, devices=ranks, max_epochs=2, callbacks=[callback], **QUIET)
    module = Module(noise)
    run.fit(module, data, data)
    run.predict(module, data, return_predictions=False)
    return callback.left


@pytest.mark.parametrize(
    ("grid", "noise"),
    [
        ({"g_inter": 2}, True),
        ({"g_inter": 2, "loss": "mean"}, False),
        ({"g_inter": 2, "microbatches": 1, "recompute": 1}, True),
        ({"g_inter": 1}, True),
    ],
    ids=["whole", "by parts", "recompute", "replicas"],
)
def test_no_tensors_wait_for_a_garbage_collection(grid: dict[str, Any], noise: bool) -> None:
    assert run_ranks(2, left, grid, 2, noise) == [{}, {}]
    if grid["g_inter"] > 1:
        assert left({**grid, "transport": "loopback"}, 1, noise) == {}
