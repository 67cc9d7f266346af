"""Steps of AdamW with what an arm adds: rates of their own, HAM's steps, and moving averages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.perplexity.arms import Arm
from benchmarks.perplexity.pruner import Masks, Pruner
from lightning_axosparse.examples.gpt import GPT

LEAST, MOST = 0.5, 3.0
"""What rates of their own are multiplied by is clamped to these."""


class Updates:
    """Updates a network as an arm says; averages are in the optimizer's state, as masks need.

    Args:
        arm: what is done.
        model: the network.
        optimizer: AdamW, of which all groups have one rate.
        pruner: of the network; it says which masks hold, and when the ticket is drawn.
    """

    def __init__(self, arm: Arm, model: GPT, optimizer: Optimizer, pruner: Pruner) -> None:
        self._arm, self._model, self._optimizer, self._pruner = arm, model, optimizer, pruner
        self._factors: dict[str, float] = {}
        self._factors_of: Masks | None = None

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Make the optimizer step after so many others, and what the arm adds to it."""
        self._step_at_own_rates()
        arm, pruner = self._arm, self._pruner
        if arm.ham or arm.ham_decay:
            for weight in (p for p in self._model.parameters() if p.dim() > 1):
                self._ham(weight)
        if arm.smoothed and pruner.begin <= step < pruner.end:
            self._average("smoothed", arm.smoothed)
        if arm.averaged and step >= pruner.end:
            self._average("averaged", arm.averaged)

    @torch.no_grad()
    def finish(self) -> None:
        """Make the averages, if there are any, the weights."""
        for weight in self._model.parameters():
            average = self._optimizer.state[weight].get("averaged")
            if average is not None:
                weight.copy_(average)

    def _step_at_own_rates(self) -> None:
        """Make an optimizer step; a step of AdamW is linear in its rate, decay and all."""
        if self._arm.own_rates and self._pruner.masks is not self._factors_of:
            self._factors_of = self._pruner.masks
            self._factors = own_factors(self._pruner.masks or {}, self._arm.own_rates)
        weights = {name: self._model.get_parameter(name) for name in self._factors}
        before = {name: weight.clone() for name, weight in weights.items()}
        self._optimizer.step()
        for name, weight in weights.items():
            weight.copy_(before[name].lerp(weight, self._factors[name]))

    def _ham(self, weight: nn.Parameter) -> None:
        """Make the step of HAM, which leaves zeros and signs as they are."""
        group, state = self._optimizer.param_groups[0], self._optimizer.state[weight]
        first, second = (1 - beta ** state["step"].item() for beta in group["betas"])
        root = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        pull = weight.sign() * (state["exp_avg"] / first) / root
        weight.mul_(torch.exp(-group["lr"] * (self._arm.ham * pull + self._arm.ham_decay)))

    def _average(self, name: str, decay: float) -> None:
        """Average all weights; the average begins as they are after the first step of it."""
        for weight in self._model.parameters():
            state: dict[str, Tensor] = self._optimizer.state[weight]
            state.setdefault(name, weight.clone()).lerp_(weight, 1 - decay)


def own_factors(masks: Masks, power: float) -> dict[str, float]:
    """Return what the rate of each weight is multiplied by: more, the less of it is kept."""
    entries = sum(mask.numel() for mask in masks.values())
    mean = sum(int(mask.sum()) for mask in masks.values()) / max(1, entries)
    densities = {name: float(mask.double().mean()) for name, mask in masks.items()}
    return {
        name: min(max((mean / density) ** power, LEAST), MOST) if density else MOST
        for name, density in densities.items()
    }


def changes_updates(arm: Arm) -> bool:
    """Return whether an arm adds anything to the steps of AdamW."""
    return any((arm.own_rates, arm.ham, arm.ham_decay, arm.averaged, arm.smoothed))
