"""One job: a task, an arm and a seed; and the numbers that it measures."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
from torch import nn

from benchmarks.perplexity.arms import Dense, Pruned, Rates
from benchmarks.perplexity.settling import Settling
from benchmarks.perplexity.tasks import Task
from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, Ticket, sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pipeline.partition import partition_layers
from lightning_axosparse.sparse.state_size import state_bytes

STAGES = 2
"""Into so many stages the model is cut where bytes of stages are compared."""

Arm = Dense | Pruned | Settling


@dataclass(frozen=True)
class Job:
    """A task, an arm and a seed: what a line of the results is found by."""

    task: Task
    arm: Arm
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, as JSON gives them back."""
        arm = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self.arm).items()}
        kind = type(self.arm).__name__.lower()
        return {"task": asdict(self.task), "arm": {"kind": kind, **arm}, "seed": self.seed}

    def run(self, english: Path | None, densities: Mapping[str, float]) -> dict[str, Any]:
        """Train, and return what was measured.

        Args:
            english: the folder of the English text, for tasks that need it.
            densities: the fraction that random masks keep of each weight.
        """
        start = time.process_time()
        L.seed_everything(self.seed, verbose=False)
        data = self.task.data(self.seed, english)
        model = self.task.model()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=self.task.epochs,
            limit_train_batches=self.task.steps,
            gradient_clip_val=self.task.clip,
            check_val_every_n_epoch=self.task.epochs,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            strategy=AxoSparseStrategy(g_inter=1, microbatches=1),
            callbacks=self._callbacks(model, densities),
        )
        with warnings.catch_warnings():  # one worker loads; weights at their floor are in the line
            warnings.simplefilter("ignore")
            trainer.fit(model, datamodule=data)
            validation = float(trainer.callback_metrics["val_perplexity"])
            [tested] = trainer.test(model, datamodule=data, verbose=False)
        measured = {
            "validation": round(validation, 4),
            "test": round(math.exp(tested["test_loss"]), 4),
            **self._pruning(trainer, model),
        }
        return {**measured, "seconds": round(time.process_time() - start, 3)}

    def _callbacks(self, model: GPT, densities: Mapping[str, float]) -> list[L.Callback]:
        if isinstance(self.arm, Pruned):
            return self.arm.callbacks(model, self.seed, densities)
        if isinstance(self.arm, Settling):
            return [self.arm.recorder()]
        return [Rates(self.arm.factor, self.arm.after)]

    def _pruning(self, trainer: L.Trainer, model: GPT) -> dict[str, Any]:
        """Return when the ticket was drawn, what it keeps, and the bytes of the stages' state."""
        if isinstance(self.arm, Settling):
            return {"distances": self.arm.found(trainer)}
        tickets = [c.ticket for c in trainer.callbacks if isinstance(c, EarlyBirdTicket)]
        ticket = tickets[0] if tickets else None
        measured: dict[str, Any] = {"stage_bytes": stage_bytes(model, ticket)}
        if ticket is not None:
            measured["draw_step"] = ticket.step
            measured["densities"] = {
                name: round(1 - pruned, 5) for name, pruned in ticket.layer_sparsity().items()
            }
        return measured


def stage_bytes(model: GPT, ticket: Ticket | None) -> list[int]:
    """Return the bytes of weights, indices, gradients and AdamW's moments of each stage.

    Args:
        model: dense; its weights are stored sparse in the end if there is a ticket.
        ticket: what is kept; None: everything.
    """
    partition = partition_layers(model, "model", None, STAGES)
    if ticket is not None:
        sparsify(model, ticket.masks)
    found = []
    for part in partition.parts:
        state = state_bytes(nn.ModuleList(partition.layers[index] for index in part))
        found.append(4 * state.weights + state.indices)
    return found
