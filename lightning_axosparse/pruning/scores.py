"""Scores the entries of weights: those of highest score are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_axosparse.sparse.module.elementwise import trial_state
from lightning_axosparse.sparse.module.optimizer_state import expand_state
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.troubleshooting import see, without_link

State = Mapping[str, Any]
"""What ``optimizer.state[parameter]`` holds; empty before its first step."""

Score = Callable[[Tensor, State], Tensor]
"""The scores of a weight's entries, of its shape, by the weight and its optimizer state."""

_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""Their names in the state of Adam and its kin, of RMSprop and Adadelta, and of Adagrad."""


def magnitude(weight: Tensor, state: State) -> Tensor:
    """Return ``|w|``."""
    return weight.abs()


def saliency(weight: Tensor, state: State) -> Tensor:
    """Return ``|w| v^(1/4)``, where v is the optimizer's estimate of the squared gradient.

    The square of it, ``w^2 sqrt(v)``, estimates how much the loss grows when the entry becomes zero
    (Optimal Brain Damage; LeCun, Denker & Solla, NeurIPS 1989): Adam's preconditioner ``sqrt(v)``
    stands for the diagonal of the Hessian.
    """
    moment = _second_moment(weight.shape, state)
    if moment is None:
        raise ValueError(
            "it has no second moment of gradients, because it has not been trained. Leave it dense "
            "with prune={...: False}, or set score='magnitude'"
        )
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.abs() * moment.to(weight.device, wide).sqrt().sqrt()


SCORES: dict[str, Score] = {"magnitude": magnitude, "saliency": saliency}


class Scores(Mapping[str, Tensor]):
    """The scores of weights by name, each computed whenever it is read: no copy is kept.

    Weights that are stored sparse are given as their kept values, and ``layouts`` says where these
    are: entries that are pruned already have the lowest score of all.
    """

    def __init__(
        self,
        score: Score,
        weights: Mapping[str, Tensor],
        state_of: Callable[[str], State],
        layouts: Mapping[str, Layout] = MappingProxyType({}),
    ) -> None:
        self._score, self._weights, self._state_of = score, weights, state_of
        self._layouts = layouts

    def __getitem__(self, name: str) -> Tensor:
        """Return the scores of a weight, without a graph."""
        weight, state = self._weights[name].detach(), self._state_of(name)
        layout = self._layouts.get(name)
        if layout is not None:
            weight, state = layout.densify(weight), expand_state(state, layout)
        with torch.no_grad():
            try:
                scores = self._score(weight, state)
            except ValueError as error:
                raise ValueError(
                    f"The weight '{name}' cannot be scored: {without_link(error)}." + see("pruning")
                ) from error
        if not isinstance(scores, Tensor) or scores.shape != weight.shape:
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"The score function returned {found} for the weight '{name}'. It must return a "
                f"tensor of the weight's shape, {tuple(weight.shape)}." + see("pruning")
            )
        if layout is None:
            return scores
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return wide.masked_fill(~layout.mask(), -torch.inf)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def has_second_moment(optimizer: Optimizer) -> bool:
    """Return whether an optimizer estimates squared gradients, as :func:`saliency` needs.

    A copy of the optimizer takes a trial step; the optimizer itself does not change.
    """
    shape = torch.Size([2, 2])
    try:
        state = trial_state(optimizer, optimizer.param_groups[0], shape)
    except (TypeError, ValueError, RuntimeError):
        # It wants a closure, sparse gradients or other shapes: refused where weights become sparse.
        return False
    return _second_moment(shape, state) is not None


def _second_moment(shape: torch.Size, state: State) -> Tensor | None:
    found = (state.get(name) for name in _SECOND_MOMENTS)
    return next((m for m in found if isinstance(m, Tensor) and m.shape == shape), None)
