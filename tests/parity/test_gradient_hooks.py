"""Gradient hooks of the user's parameters see the gradient of a whole batch, as on one process.

They run on each replica's gradient before the data-parallel average, as with Lightning's ddp.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, difference, fit, free_port, join_ddp, trainer
from tests.ranks import run_ranks

CLAMPED, NORMALIZED = 1e-3, 1e-2


class Hooked(Callback):
    """Hooks of all kinds, on parameters of one stage, of several, and outside the layers."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def on_train_start(self, run: Any, module: Any) -> None:
        parameters = dict(module.named_parameters())

        def count(name: str) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1

        def clamp(name: str) -> Any:
            def hook(gradient: Tensor) -> Tensor:
                count(name)
                return gradient.clamp(-CLAMPED, CLAMPED)

            return hook

        def normalize(name: str) -> Any:
            def hook(parameter: Any) -> None:
                count(name)
                parameter.grad *= NORMALIZED / (NORMALIZED + parameter.grad.norm())

            return hook

        for name in ("model.0.weight", "model.2.weight", "model.5.bias", "temperature"):
            parameters[name].register_hook(clamp(name))
        for name in ("model.0.bias", "model.2.weight", "model.5.weight", "scale"):
            parameters[name].register_post_accumulate_grad_hook(normalize(name))
        parameters["model.4.bias"].register_hook(lambda gradient: gradient.div_(2).neg_())


def train(strategy: Any, devices: int = 1, **options: Any) -> tuple[Record, dict[str, int]]:
    L.seed_everything(0, verbose=False)
    hooked = Hooked()
    settings = {"max_epochs": 1, "precision": "64-true", "accumulate_grad_batches": 2, **options}
    run = trainer(strategy, devices, callbacks=[hooked], **settings)
    return fit(run, Net(outer=True, tied=True)), hooked.calls


def on_ranks(ranks: int, port: int) -> dict[str, Any]:
    """Stages x replicas, and Lightning's ddp."""
    found = {}
    for stages in (stages for stages in (1, 2, 4) if stages <= ranks):
        strategy = AxoSparseStrategy(g_inter=stages, microbatches=3)
        found[f"{stages}x{ranks // stages}"] = train(strategy, ranks)
    join_ddp(ranks, port)
    found["ddp"] = train("ddp", ranks)
    return found


def test_hooks_see_the_batch_of_a_replica_on_ranks() -> None:
    one = train("auto")
    jobs = {ranks: run_ranks(ranks, on_ranks, ranks, free_port()) for ranks in (2, 4)}
    called: dict[str, set[str]] = {}
    for ranks, job in jobs.items():
        for rank, found in enumerate(job):
            for grid in found.keys() - {"ddp"}:
                stages, replicas = map(int, grid.split("x"))
                # Each replica has the losses of its own batches.
                expected = one if replicas == 1 else jobs[replicas][rank // stages]["ddp"]
                record, calls = found[grid]
                assert difference(expected[0], record) < 1e-12, (ranks, rank, grid)
                assert calls.items() <= expected[1].items(), (ranks, rank, grid)
                called.setdefault(grid, set()).update(calls)
    assert called == dict.fromkeys(("2x1", "1x2", "4x1", "2x2", "1x4"), one[1].keys())
