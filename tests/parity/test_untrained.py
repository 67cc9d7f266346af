"""Weights that no step trains stay dense, on every grid, and all others are pruned."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, GradualPruning
from tests.parity.cases import Net, Record, loader, recorded, share, trained, trainer
from tests.ranks import run_ranks

UNTRAINED = {"model.0.deeper.weight", "model.4.deeper.weight", "unused.weight"}


class Shallow(nn.Linear):
    """A layer that has more than it uses, as an encoder that is deeper than its decoder."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.deeper = nn.Linear(outputs, outputs)


class Deep(Net):
    """Has a weight that no step uses in either stage, and one outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        for number in (0, 4):
            layer: Any = self.model[number]
            self.model[number] = Shallow(layer.in_features, layer.out_features)
        self.unused = nn.Linear(3, 4)


PRUNING: dict[str, Any] = {
    "gradual": lambda: GradualPruning(0.6, start=4, every=3, end=15),
    "once": lambda: EarlyBirdTicket(0.6, every=3, draw_by=12, window=2),
}


def train(pruning: str, ranks: int, **grid: Any) -> tuple[Record, Any, list[str]]:
    """Train on the same global batches on every grid."""
    L.seed_everything(0, verbose=False)
    callback = PRUNING[pruning]()
    run = trainer(
        AxoSparseStrategy(microbatches=2, **grid),
        ranks,
        callbacks=[callback],
        precision="64-true",
        use_distributed_sampler=False,
    )
    module = Deep().double()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(module, share(run, loader(1).dataset))
    told = [str(each.message) for each in said if "left dense" in str(each.message)]
    return recorded(run, module), callback.ticket, told


GRIDS: dict[str, dict[str, Any]] = {
    "stages": {"g_inter": 2},
    "replicas": {"g_inter": 1},
    "divided": {"g_inter": 1, "shard_optimizer": True},
}


def on_two_ranks() -> dict[tuple[str, str], tuple[Record, Any, list[str]]]:
    return {(p, name): train(p, 2, **grid) for p in PRUNING for name, grid in GRIDS.items()}


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    return run_ranks(2, on_two_ranks)


def initial() -> dict[str, Tensor]:
    L.seed_everything(0, verbose=False)
    return {name: value.double() for name, value in Deep().state_dict().items()}


@pytest.mark.parametrize("pruning", PRUNING)
def test_every_grid_prunes_the_rest_as_one_process(pruning: str, runs: list[Any]) -> None:
    alone, ticket, told = train(pruning, 1)
    assert len(told) == 1
    assert told[0].startswith(f"{', '.join(sorted(UNTRAINED))}: left dense, because no step has")
    matrices = {n for n, p in Deep().named_parameters() if p.dim() > 1}
    assert ticket.masks.keys() == matrices - UNTRAINED
    before = initial()
    for name in UNTRAINED:
        assert torch.equal(alone.weights[name], before[name]), name
    found = {"loopback": train(pruning, 1, g_inter=2, transport="loopback")}
    first, second = ({grid: rank[pruning, grid] for grid in GRIDS} for rank in runs)
    assert [len(said) for _, _, said in second.values()] == [0, 0, 0]
    for case, (record, drawn, said) in {**found, **first}.items():
        assert said == told, case
        assert drawn == ticket, case
        for name, weight in alone.weights.items():
            assert torch.allclose(record.weights[name], weight, rtol=0, atol=1e-12), (case, name)


class Taught(Net):
    """Moves an average of the first layer along, as a teacher of its own."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.model[0]
        self.teacher = nn.Linear(first.in_features, first.out_features).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for name, old in self.teacher.named_parameters():
                old.lerp_(attrgetter(name)(self.model[0]), 0.1)


def test_a_dense_average_of_pruned_weights_is_that_of_one_process() -> None:
    records = []
    for stages in (1, 2):
        callback = GradualPruning(0.6, start=4, every=3, end=15, which={"teacher.*": False})
        grid = AxoSparseStrategy(stages, 2, transport="loopback")
        records.append(trained(Taught, grid, 1, loader(1), callbacks=[callback]))
    one, two = (record.weights for record in records)
    assert 0 < one["model.0.weight"].count_nonzero() < one["teacher.weight"].count_nonzero()
    for name, weight in one.items():
        assert torch.allclose(two[name], weight, rtol=0, atol=1e-12), name
