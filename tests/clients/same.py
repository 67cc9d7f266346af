"""Says whether a client's own training call does with this package what it does without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy, GradualPruning
from lightning_axosparse.pruning.rule import cubic_ratio, prunable
from tests.parity.cases import Record, Recorder, difference, free_port, join_ddp, whole_state
from tests.parity.test_gradual_pruning import largest
from tests.quiet import QUIET
from tests.ranks import run_ranks

Train = Callable[..., Any]
"""A client's own call that trains, with arguments of its Trainer; returns what the client does."""

RATIO, START, EVERY, END, STEPS = 0.6, 1, 2, 5, 8
PRUNED = {3: cubic_ratio(RATIO, 0.5), 5: RATIO}
"""The ratios of :func:`pruning` by optimizer steps."""

GRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({}, 1),
    "loopback": ({"g_inter": 2, "transport": "loopback"}, 1),
    "two stages": ({"g_inter": 2}, 2),
}
"""Arguments of the strategy, and devices of the Trainer, which starts the ranks."""


class ClientRecorder(Recorder):
    """Also records Trainer and module, which clients make."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.trainer, self.module = trainer, module

    def __deepcopy__(self, memo: Any) -> ClientRecorder:
        return self  # Some clients copy their arguments.


class Masked(L.Callback):
    """Prunes in plain Lightning as :func:`pruning` does: masks weights, gradients and state."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        parameters, names = dict(module.named_parameters()), prunable(module)
        self.weights = {name: parameters[name] for name in names}
        self.masks: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name, mask in self.masks.items():
            if self.weights[name].grad is not None:
                self.weights[name].grad *= mask

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step not in PRUNED:
            return
        self.masks = largest(self.weights, PRUNED[trainer.global_step])
        for name, mask in self.masks.items():
            weight = self.weights[name]
            weight.data *= mask
            for value in trainer.optimizers[0].state[weight].values():
                if torch.is_tensor(value) and value.shape == mask.shape:
                    value *= mask


def pruning() -> GradualPruning:
    """The pruning that is compared with :class:`Masked`."""
    return GradualPruning(RATIO, START, END, EVERY, score="magnitude", floor=0.0)


def call(train: Train, strategy: Any, *callbacks: L.Callback, **options: Any) -> Any:
    """Let a client train for eight steps."""
    L.seed_everything(0, verbose=False)
    return train(
        strategy=strategy,
        callbacks=[*callbacks],
        accelerator="cpu",
        max_steps=STEPS,
        num_sanity_val_steps=0,
        **{"devices": 1, **QUIET, **options},
    )


def pruned(train: Train) -> Any:
    """What a client returns after pruning on one rank.

    The strategy has a name, as clients make a Trainer for predictions of the same arguments.
    """
    return call(train, "axosparse", pruning())


def run(train: Train, strategy: Any, *callbacks: L.Callback, devices: int = 1) -> Record:
    """What a client's training does."""
    recorder = ClientRecorder()
    call(train, strategy, recorder, *callbacks, devices=devices, precision="64-true")
    assert len(recorder.record.losses) == STEPS
    recorder.record.weights = whole_state(recorder.trainer, recorder.module)
    return recorder.record


def assert_same(train: Train, grid: str, tolerance: float = 1e-12, **strategy: Any) -> None:
    """A run that prunes has the numbers of masked training in plain Lightning."""
    arguments, devices = GRIDS[grid]
    expected = run(train, "auto", Masked())
    found = run(train, AxoSparseStrategy(**arguments, **strategy), pruning(), devices=devices)
    assert difference(expected, found) <= tolerance


def on_rank(train: Train, strategy: Any, port: int) -> Record:
    """What a client's training does on one of two ranks that share the batches."""
    if strategy == "ddp":
        join_ddp(2, port)
    return run(train, strategy, devices=2)


def assert_replicas_same(train: Train, tolerance: float = 1e-12) -> None:
    """Two replicas have the numbers of Lightning's ``ddp``, on each rank.

    Running statistics count on the first: ``ddp`` sends them to the others before each batch.
    """
    expected = run_ranks(2, on_rank, train, "ddp", free_port())
    found = run_ranks(2, on_rank, train, AxoSparseStrategy(), 0)
    for rank, pair in enumerate(zip(found, expected, strict=True)):
        for record in pair if rank else ():
            record.weights = {k: w for k, w in record.weights.items() if "running_" not in k}
        assert difference(*pair) <= tolerance, rank
