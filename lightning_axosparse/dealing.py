"""Dealing: which layers of a module each stage computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_axosparse.pipeline.partition import (
    balance,
    count_parameters,
    find_container,
    given,
    imbalance,
)
from lightning_axosparse.pipeline.profile import LayerProfile, profile_layers


class Deal(NamedTuple):
    """Which layers of a module each stage computes."""

    names: list[str]
    layers: list[nn.Module]
    parts: list[range]
    costs: Sequence[float]
    measure: str
    given: bool = False

    def among(self, stages: int) -> Deal:
        """Deal the same layers to fewer stages; parts that the user gave are joined.

        Args:
            stages: a divisor of the present number of stages.
        """
        joined = len(self.parts) // stages
        if self.given:
            firsts, lasts = self.parts[::joined], self.parts[joined - 1 :: joined]
            parts = [range(a.start, b.stop) for a, b in zip(firsts, lasts, strict=True)]
        else:
            parts = balance(self.costs, stages)
        return self._replace(parts=parts)

    def by_time(self, seconds: Sequence[float]) -> Deal:
        """Deal the same layers so that the slowest stage is as fast as possible.

        Args:
            seconds: time that each layer takes.
        """
        parts = balance(seconds, len(self.parts))
        return self._replace(parts=parts, costs=seconds, measure="time")

    def __str__(self) -> str:
        """Tell the parts, and how uneven they are expected to be."""
        sizes = " + ".join(str(len(part)) for part in self.parts)
        worst = imbalance(self.costs, self.parts)
        return (
            f"Layers {self.names[0]!r} to {self.names[-1]!r} dealt to {len(self.parts)} stages: "
            f"{sizes}. The largest stage has {worst:.2f} times the mean stage's {self.measure}."
        )


UNDIVIDED = Deal([], [], [range(0)], [], "parameters")
"""One stage, which computes the module as it is."""


def deal(
    module: nn.Module, container: str | None, sizes: Sequence[int] | None, stages: int
) -> Deal:
    """Deal the layers of a module's container to the stages.

    Args:
        module: the user's module.
        container: attribute path of the container; None for the only candidate.
        sizes: layers of each stage; None balances by parameters.
        stages: number of stages.

    Raises:
        MisconfigurationException: if there is no such container or not enough layers.
    """
    path, found = find_container(module, container, stages)
    names = [f"{path}.{key}" for key, _ in found.named_children()]
    layers = list(found.children())
    counts = count_parameters(layers)
    parts = balance(counts, stages) if sizes is None else given(sizes, len(layers), stages)
    return Deal(names, layers, parts, counts, "parameters", given=sizes is not None)


def refuse_no_example(module: LightningModule) -> None:
    """Refuse to time the layers of a module that does not say on what.

    Raises:
        MisconfigurationException: if it has no ``example_input_array``.
    """
    if module.example_input_array is None:
        raise MisconfigurationException(
            f"balance='time' runs {type(module).__name__} on its example_input_array, which is "
            "None. Set it in __init__ to what `forward` takes, of a micro-batch's size, or use "
            "balance='parameters'."
        )


def profile_example(
    module: LightningModule, dealt: Deal, precision: Precision, device: torch.device
) -> list[LayerProfile]:
    """Measure the layers on the module's ``example_input_array``.

    Args:
        module: the user's module, whole and on CPU.
        dealt: its layers.
        precision: of the forward pass.
        device: where to measure.

    Returns:
        What each layer takes.

    Raises:
        MisconfigurationException: if the example does not reach every layer.
    """
    example = precision.convert_input(module.example_input_array)

    def forward() -> None:
        if isinstance(example, Mapping):
            module(**example)
        else:
            module(*(example if isinstance(example, tuple) else (example,)))

    layers = dict(zip(dealt.names, dealt.layers, strict=True))
    return profile_layers(layers, forward, precision.forward_context, device)
