"""A batch that has to run again leaves what one run leaves, and pruning makes none run again."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy, GradualPruning
from tests.parity.cases import Record, difference, recorded, trainer
from tests.ranks import run_ranks

WIDTH, BATCH, STEPS = 8, 4, 6


class Counting(nn.Tanh):
    """Counts its batches in Python, and stores the largest value of each."""

    batches, largest = 0, ()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
            self.largest = (*self.largest, float(x.detach().max()))
        return super().forward(x)


class Autoencoder(L.LightningModule):
    """Draws numbers between layers with running statistics, behind a linear layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counting())
            for _ in range(2)
        )
        self.mean, self.deviation = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        hidden = self.layers[0](x)
        latent = torch.distributions.Normal(self.mean(hidden), self.deviation(hidden).exp())
        loss = (self.layers[1](latent.rsample()) - x).square().mean() + latent.scale.mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(strategy: Any, ranks: int = 1, prunes: bool = True) -> tuple[Record, list[Any]]:
    """Train, and count the runs of batches that are void."""
    from lightning_axosparse.strategy.step.learning import StepLearner

    again, run_again = [], StepLearner.run_again

    def counted(*args: Any) -> Any:
        again.append(args[-1].name)
        return run_again(*args)

    L.seed_everything(0, verbose=False)
    callbacks = [GradualPruning(0.6, 1, 5, 2, score="magnitude")] if prunes else []
    run = trainer(strategy, ranks, max_epochs=1, precision="64-true", callbacks=callbacks)
    x = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
    module = Autoencoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLearner, "run_again", counted)
        run.fit(module, DataLoader(TensorDataset(x.double()), BATCH))
    record = recorded(run, module)
    counts = [(layer[-1].batches, len(layer[-1].largest)) for layer in module.layers]
    record.facts["counts"] = max(counts)  # A rank counts in its own layers.
    return record, again


def stages(**more: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, microbatches=1, **more)


def assert_one_run(found: tuple[Record, list[Any]], expected: tuple[Record, list[Any]]) -> None:
    (record, again), (alone, _) = found, expected
    assert again == ["DRAWS"], "the first batch alone, as it draws numbers between layers"
    assert int(record.weights["layers.0.1.num_batches_tracked"]) == STEPS
    assert difference(record, alone) <= 1e-12


def test_a_batch_that_runs_again_changes_buffers_and_counts_once() -> None:
    expected = train("auto", prunes=False)
    assert_one_run(train(stages(transport="loopback"), prunes=False), expected)


def test_layers_that_are_pruned_between_stages_send_what_they_did() -> None:
    expected = train(AxoSparseStrategy())
    assert_one_run(train(stages(transport="loopback")), expected)
    for found in run_ranks(2, train, stages(), 2):
        assert_one_run(found, expected)
