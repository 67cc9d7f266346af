"""With batch_norm="deferred" running statistics are those of whole batches, as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import (
    BATCHES,
    EPOCHS,
    FEATURES,
    Net,
    Record,
    difference,
    fit,
    loader,
    recorded,
    trainer,
)
from tests.parity.test_checkpoints import share
from tests.ranks import run_ranks


class Watching(nn.Module):
    """A layer whose norm sees the values, but does not change them."""

    def __init__(self, inputs: int, outputs: int, momentum: float | None) -> None:
        super().__init__()
        self.linear, self.norm = (
            nn.Linear(inputs, outputs),
            nn.BatchNorm1d(outputs, momentum=momentum),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        return x + 0 * self.norm(x)


class Watched(Net):
    """Norms in layers, as a layer, before the layers and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.BatchNorm1d(FEATURES), nn.BatchNorm1d(5)
        self.model = nn.Sequential(
            Watching(FEATURES, 24, 0.3), Watching(24, 24, None), Watching(24, 5, 0.1)
        )
        self.model[1].norm.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        x = self.model(x + 0 * self.before(x))
        return x + 0 * self.behind(x)


class Normed(Net):
    """A norm that is a layer, first of all: what it sees does not depend on micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, nn.BatchNorm1d(FEATURES))


def train(module: type[Net], strategy: Any, ranks: int = 1, extra: int = 5) -> Record:
    L.seed_everything(0, verbose=False)
    run = trainer(strategy, ranks, precision="64-true", use_distributed_sampler=False)
    network, places = module(), getattr(run.strategy, "distributed_sampler_kwargs", None)
    if ranks == 1 or places["num_replicas"] == 1:
        return fit(run, network, extra)
    # A part of each batch, as with one process and the whole of it.
    run.fit(network, share(loader(1), **places), share(loader(2, batches=3), **places))
    return recorded(run, network)


def deferred(stages: int, microbatches: int | None = 2, **options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(
        stages, microbatches, pipeline="model", batch_norm="deferred", **options
    )


def on_ranks() -> dict[str, Record]:
    """Two stages, recomputed or not, and two replicas."""
    return {
        "stages": train(Watched, deferred(2), 2),
        "recompute": train(Watched, deferred(2, recompute=1), 2),
        "default": train(Watched, deferred(2, None), 2),
        "layer": train(Normed, deferred(2), 2),
        "replicas": train(Watched, deferred(1, 2), 2, extra=0),
        "replicas, whole": train(Watched, deferred(1, 1), 2, extra=0),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Record]]:
    return run_ranks(2, on_ranks)


def statistics(record: Record) -> dict[str, Tensor]:
    return {k: v for k, v in record.weights.items() if "running" in k or "tracked" in k}


def test_stages(ranks: list[dict[str, Record]]) -> None:
    expected = train(Watched, "auto")
    updates = expected.weights["model.2.norm.num_batches_tracked"]
    assert updates == EPOCHS * (BATCHES + 1)  # the last batch is smaller
    compared = [train(Watched, deferred(2, transport="loopback"))]
    compared += [records[name] for records in ranks for name in ("stages", "recompute", "default")]
    for record in compared:
        assert difference(expected, record) <= 1e-12


def test_a_norm_that_changes_the_values(ranks: list[dict[str, Record]]) -> None:
    expected = statistics(train(Normed, "auto"))
    every = train(Normed, AxoSparseStrategy(2, 2, pipeline="model", transport="loopback"))
    updates = "model.0.num_batches_tracked"
    assert every.weights[updates] == 2 * expected[updates]
    for records in ranks:
        for name, value in statistics(records["layer"]).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["replicas", "replicas, whole"])
def test_replicas_see_the_whole_batch(name: str, ranks: list[dict[str, Record]]) -> None:
    expected = train(Watched, "auto", extra=0)
    for records in ranks:
        assert len(records[name].losses) == len(expected.losses)
        for key, value in expected.weights.items():
            torch.testing.assert_close(records[name].weights[key], value, rtol=0, atol=1e-12)
