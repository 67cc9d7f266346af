"""Trains dense weights of which masked entries are zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MaskedWeights:
    """Dense weights under masks: entries that are not kept are zero, with their optimizer state.

    They stay zero as long as :meth:`mask_gradients` is called before each optimizer step, under
    every elementwise optimizer. Masks on the device take one byte an entry.

    Args:
        weights: name -> weight, of which some may have no mask.
        masks: name -> bool tensor, True where an entry is kept.
        optimizers: those that hold the weights.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        masks: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._pruned = {
            weight: ~masks[name].to(weight.device)
            for name, weight in weights.items()
            if name in masks
        }
        with torch.no_grad():
            for weight, pruned in self._pruned.items():
                weight.masked_fill_(pruned, 0)
                for state in (o.state[weight] for o in optimizers if weight in o.state):
                    for value in state.values():
                        if isinstance(value, Tensor) and value.shape == weight.shape:
                            value.masked_fill_(pruned.to(value.device), 0)

    def mask_gradients(self) -> None:
        """Make the gradients zero where the weights are."""
        for weight, pruned in self._pruned.items():
            if weight.grad is not None:
                weight.grad.masked_fill_(pruned, 0)
