"""Prunes a network while it trains in one process, as an arm says, with the package's functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.perplexity.arms import Arm
from benchmarks.perplexity.masked_weights import MaskedWeights
from benchmarks.perplexity.regrowth import Growth, by_chance, cosine_fraction, regrown
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.pruning.rule import (
    MaskRule,
    MaskSchedule,
    Score,
    State,
    magnitude,
    saliency,
)

Masks = dict[str, Tensor]

SLOWER = 0.01
"""The weight of a step in the average of squared gradients of ``score="slow"``."""

GROWTH: dict[str, Growth] = {"set": "random", "rigl": "gradient", "gradual": "gradient"}


class Pruner:
    """Changes masks and rates of a dense network in training; pruned entries are zero.

    Args:
        arm: what is done when.
        model: the network.
        optimizer: AdamW.
        steps: of the whole run.
        seed: of entries that grow at random.

    Attributes:
        masks: those that hold; None before the first.
        teacher: the dense network of the beginning, where the arm distills.
        begin: optimizer steps before the first change.
        end: optimizer steps before the draw.
    """

    def __init__(self, arm: Arm, model: GPT, optimizer: Optimizer, steps: int, seed: int) -> None:
        if (arm.scope, arm.power) != ("global", 1.0):
            raise ValueError(
                f"The package ranks all weights together: {arm.label} cannot be run any more."
            )
        self.arm, self.seed, self.steps = arm, seed, steps
        self.begin = round(arm.begin * steps) if arm.changes else steps
        self.end = round(arm.end * steps) if arm.changes else steps
        self.masks: Masks | None = None
        self.teacher: nn.Module | None = None
        self._model, self._optimizer = model, optimizer
        self._weights: MaskedWeights | None = None
        self._rule = MaskRule(arm.ratio, score_of(arm), arm.floor)
        self._schedule = MaskSchedule(
            self.begin, max(1, round(arm.every * steps)), max(self.end, self.begin + 1)
        )

    def begin_step(self, step: int) -> None:
        """Change the masks if that is due before a forward pass, after so many steps."""
        if not self.arm.ratio or not self.begin <= step <= self.end:
            return
        if step == self.begin and self.arm.distill:
            self.teacher = deepcopy(self._model.model).requires_grad_(False).eval()
        if step == self.end:
            self._draw()
        elif self.arm.method != "returning" and self._schedule.changes_after(step):
            if self.arm.method in ("gradual", "through"):
                self._hold(self.chosen(self.arm.ratio * self._ramp(step)), step)
            elif self.masks is None:
                self._hold(self.chosen(self.arm.ratio), step)

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Compute with the kept entries alone, where those under the mask train on too."""
        if self.arm.method != "through" or not self.begin <= step < self.end:
            yield
            return
        assert self.masks is not None
        weights = [(self._model.get_parameter(name), mask) for name, mask in self.masks.items()]
        dense = [weight.detach().clone() for weight, _ in weights]
        with torch.no_grad():
            for weight, mask in weights:
                weight.mul_(mask)
        yield
        with torch.no_grad():
            for (weight, _), values in zip(weights, dense, strict=True):
                weight.copy_(values)

    def on_gradients(self, step: int) -> None:
        """Drop and regrow entries if that is due, then mask the gradients of this step."""
        if self.arm.score == "slow" and self.begin <= step < self.end:
            self._average_squares()
        regrows = self.arm.method in ("set", "rigl") or self.arm.drop > 0
        due = self.begin < step < self.end and self._schedule.changes_after(step)
        if self.arm.ratio and regrows and due:
            assert self.masks is not None
            grown = regrown(
                dict(self._model.named_parameters()),
                MaskBits(self.masks),
                cosine_fraction(self.arm.drop, self._schedule.progress(step)),
                GROWTH[self.arm.method],
                hash((self.seed, step)),
            )
            self._hold(grown, step)
        if self._weights is not None:
            self._weights.mask_gradients()

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """Make all but the largest entries of each weight zero, if they may return."""
        due = self.begin <= step < self.end
        if self.arm.method != "returning" or not due:
            return
        if self.arm.every and not self._schedule.changes_after(step):
            return
        self.masks = self._largest(self.arm.ratio * self._ramp(step + 1))
        for name, mask in self.masks.items():
            self._model.get_parameter(name).mul_(mask)

    def _largest(self, ratio: float) -> Masks:
        """Return the masks of the same fraction of each weight, of the largest entries."""
        weights = {name: self._model.get_parameter(name) for name in self._rule.sizes(self._model)}
        return {name: largest(w, ratio, self.arm.row_floor) for name, w in weights.items()}

    def _average_squares(self) -> None:
        """Average squared gradients over more steps than AdamW, in its state."""
        for name in self._rule.sizes(self._model):
            weight = self._model.get_parameter(name)
            state = self._optimizer.state[weight]
            average = state.setdefault("slow", state["exp_avg_sq"].clone())
            average.lerp_(weight.grad.square(), SLOWER)

    def factor(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied by."""
        if step < self.begin:
            return 1.0
        arm = self.arm
        pruned = 1.0 if arm.method in ("once", "set", "rigl") else self._ramp(step)
        rewarm = round(arm.rewarm * self.steps)
        warm = min(1.0, (step - self.end + 1) / rewarm) if rewarm and step >= self.end else 1.0
        kept = 1 - arm.ratio * pruned
        return float((1 + (arm.factor - 1) * pruned) * kept**-arm.rise * warm)

    def _ramp(self, step: int) -> float:
        """Return which part of the ratio is pruned after so many steps, step by step.

        The package's schedule is that of power 3.
        """
        return float(1 - (1 - self._schedule.progress(step)) ** self.arm.ramp)

    def chosen(self, ratio: float) -> Masks:
        """Return the masks that keep the entries of highest score, or as many at random."""
        rule = replace(self._rule, ratio=ratio)
        masks = rule.masks(self._model, [self._optimizer])
        if self.arm.entries == "random":
            return {name: at_random(name, mask) for name, mask in masks.items()}
        return masks

    def _draw(self) -> None:
        """Prune by the ticket, and train on with the weight decay of the arm."""
        if self.arm.method in ("set", "rigl"):
            drawn = self.masks
        elif self.arm.method == "returning":
            drawn = self._largest(self.arm.ratio)
        else:
            drawn = self.chosen(self.arm.ratio)
        assert drawn is not None
        self._hold(drawn, self.end)
        if self.arm.decay is not None:
            matrices, _ = self._optimizer.param_groups
            matrices["weight_decay"] = self.arm.decay

    def _hold(self, masks: Masks, step: int) -> None:
        """Train under these masks from now on."""
        self.masks = masks
        if self.arm.method != "through" or step >= self.end:
            weights = dict(self._model.named_parameters())
            self._weights = MaskedWeights(weights, masks, [self._optimizer])

    def state_dict(self) -> dict[str, Any]:
        """Return masks and teacher; the optimizer's state has the weight decay."""
        return {"masks": self.masks, "teacher": self.teacher and self.teacher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on after so many steps."""
        if state["masks"] is not None and (self.arm.method != "returning" or step > self.end):
            self._hold(state["masks"], step)
        if state["teacher"] is not None:
            self.teacher = deepcopy(self._model.model).requires_grad_(False).eval()
            self.teacher.load_state_dict(state["teacher"])


def fisher(weight: Tensor, state: State) -> Tensor:
    """Return ``|w| sqrt(v)``: Optimal Brain Damage, with Fisher's diagonal matrix for the Hessian.

    Where the arm has it, v is averaged over more steps than AdamW's.
    """
    return weight.abs() * state.get("slow", state["exp_avg_sq"]).sqrt()


def by_power(power: float) -> Score:
    """Return the score ``|w| v^power``."""

    def score(weight: Tensor, state: State) -> Tensor:
        return weight.abs() * state["exp_avg_sq"].pow(power)

    return score


def by_roots(weight: Tensor, state: State) -> Tensor:
    """Return the score ``|w| v^(3/16)``, by square roots alone, which are rounded correctly."""
    eighth = state["exp_avg_sq"].sqrt().sqrt().sqrt()
    return weight.abs() * eighth * eighth.sqrt()


SCORES: dict[str, Score] = {
    "magnitude": magnitude,
    "saliency": fisher,
    "slow": fisher,
    "curvature": saliency,
    "sixth root": by_power(1 / 6),
    "v^(3/16)": by_roots,
    **{f"v^{power}": by_power(power) for power in (0.08, 0.125, 0.17, 0.35)},
}
"""By their names in the results, of which "saliency" is older than the package's formula."""


def score_of(arm: Arm) -> Score:
    """Return the score of an arm, by name, of averaged weights, by blocks, with a floor a row."""
    score = SCORES[arm.score]
    if arm.smoothed:
        score = by_average(score)
    if arm.block > 1:
        score = by_block(score, arm.block)
    return with_row_floor(score, arm.row_floor) if arm.row_floor else score


def by_average(score: Score) -> Score:
    """Return the score of the moving averages of weights, once there are any."""

    def averaged(weight: Tensor, state: State) -> Tensor:
        return score(state.get("smoothed", weight), state)

    return averaged


def by_block(score: Score, rows: int) -> Score:
    """Return the score of a block of so many rows of a column, the same for all its entries."""

    def of_block(weight: Tensor, state: State) -> Tensor:
        scores = score(weight, state)
        blocks = scores.view(-1, rows, scores.shape[-1])
        return blocks.mean(1, keepdim=True).expand_as(blocks).reshape(scores.shape)

    return of_block


def with_row_floor(score: Score, count: int) -> Score:
    """Return a score by which the best entries of each row, so many, come before all others.

    An entry without a score, such as of a byte that no text has, is left where it is.
    """

    def raised(weight: Tensor, state: State) -> Tensor:
        scores = score(weight, state)
        best = scores.topk(min(count, scores.shape[-1]), dim=-1)
        first = torch.where(best.values > 0, torch.inf, best.values)
        return scores.scatter(-1, best.indices, first)

    return raised


def largest(weight: Tensor, ratio: float, row_floor: int) -> Tensor:
    """Return the mask of the largest entries; each row has so many, even if that is more."""
    size = with_row_floor(magnitude, row_floor)(weight, {}) if row_floor else weight.abs()
    pruned = round(ratio * size.numel())
    if not pruned:
        return torch.ones_like(size, dtype=torch.bool)
    return (size > size.flatten().kthvalue(pruned).values) | size.isinf()


def at_random(name: str, mask: Tensor) -> Tensor:
    """Return a mask of as many random entries, the same ones for a weight of one name."""
    order = by_chance(mask, {"seed": crc32(name.encode())}).flatten().argsort(descending=True)
    kept = torch.zeros(mask.numel(), dtype=torch.bool)
    kept[order[: int(mask.sum())]] = True
    return kept.view(mask.shape)
