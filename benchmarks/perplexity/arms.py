"""The arms that are compared: dense, pruned by a ticket, and pruned by masks without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch import Callback

from benchmarks.perplexity.entries import TRIED
from lightning_axosparse import EarlyBirdTicket, Ticket
from lightning_axosparse.examples.gpt import GPT


@dataclass(frozen=True)
class Dense:
    """No pruning; with ``factor`` the control of a pruned arm, which has the same learning rates.

    Attributes:
        factor: what the learning rates are multiplied by,
        after: from this share of the run on.
    """

    factor: float = 1.0
    after: float = 0.25


@dataclass(frozen=True)
class Pruned:
    """Pruned by ``EarlyBirdTicket``, of whose arguments most attributes are.

    Attributes:
        masks: "ticket": drawn while training; "random": random from the start, with the layer
            densities of the ticket; "initial": the largest weights of the initialization, from the
            start. The learning rates of all are the same.
        ratio: fraction of the entries to prune.
        factor: what the learning rates are multiplied by from the draw on; without a draw, from
            ``draw_after`` on.
        score: what says how much each weight keeps.
        entries: which entries of each weight are kept.
        scope: how the weights share what is kept.
        floor: the least share of each weight.
        dense: kinds and name patterns of weights that are not pruned.
        pattern: what is kept or pruned together.
        method: how masks change before the draw.
        every: how often masks are compared, as a share of the run.
        threshold: the distance at which the ticket is drawn.
        draw_after: the earliest draw, as a share of the run.
        draw_by: the latest draw.
    """

    masks: Literal["ticket", "random", "initial"] = "ticket"
    ratio: float = 0.8
    factor: float = 2.0
    score: str = "saliency"
    entries: str = "score"
    scope: Literal["global", "layer", "uniform-stage", "erk"] = "global"
    floor: float = 0.05
    dense: tuple[str, ...] = ()
    pattern: str | None = None
    method: Literal["early-bird", "gradual", "set", "rigl"] = "early-bird"
    every: float = 1 / 32
    threshold: float = 0.5
    draw_after: float = 0.25
    draw_by: float = 0.4

    def callbacks(self, model: GPT, seed: int, densities: Mapping[str, float]) -> list[Callback]:
        """Return the callbacks that prune and set the learning rates.

        Args:
            model: with its initial weights.
            seed: of random masks.
            densities: the fraction that random masks keep of each weight.
        """
        prune = dict.fromkeys(self.dense, False)
        ticket = None
        if self.masks == "random":
            ticket = of_densities(model, densities).random(seed)
        elif self.masks == "initial":
            ticket = Ticket.magnitude(model, self.ratio, floor=self.floor, prune=prune)
        search = EarlyBirdTicket(
            self.ratio,
            score=self.score,  # type: ignore[arg-type]
            entries=TRIED.get(self.entries, self.entries),  # type: ignore[arg-type]
            scope=self.scope,
            floor=self.floor,
            prune=prune,
            pattern=self.pattern,
            method=self.method,
            every=self.every,
            threshold=self.threshold,
            draw_after=self.draw_after,
            draw_by=self.draw_by,
            learning_rate_factor=self.factor,
            ticket=ticket,
        )
        return [search] if ticket is None else [search, Rates(self.factor, self.draw_after)]


class Rates(Callback):
    """Multiplies the learning rates from a share of the run on, as after a draw."""

    def __init__(self, factor: float, after: float) -> None:
        self.factor, self.after = factor, after

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step >= round(self.after * trainer.estimated_stepping_batches):
            strategy.learning_rate_factor = self.factor


def of_densities(model: GPT, densities: Mapping[str, float]) -> Ticket:
    """Return a ticket that keeps these fractions of the weights, their first entries."""
    masks = {}
    for name, density in densities.items():
        weight = model.get_parameter(name)
        masks[name] = (torch.arange(weight.numel()) < round(density * weight.numel())).view_as(
            weight
        )
    kept = sum(int(mask.sum()) for mask in masks.values())
    return Ticket(masks, 1 - kept / sum(mask.numel() for mask in masks.values()))
