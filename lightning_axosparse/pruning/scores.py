"""Scores the entries of weights: those of highest score are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_axosparse.sparse.module.optimizer_state import expand_state, trial_state
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


class Stored(NamedTuple):
    """A weight as it is stored: dense, or its kept values and where they are."""

    values: Tensor
    state: State
    layout: Layout | None


class Scores(Mapping[str, Tensor]):
    """The scores of weights by name, each computed whenever it is read: no copy is kept.

    Of weights that are stored sparse, entries that are pruned have the lowest score of all.
    """

    def __init__(self, score: Score, names: Sequence[str], stored: Callable[[str], Stored]) -> None:
        self._score, self._names, self._stored = score, names, stored

    def __getitem__(self, name: str) -> Tensor:
        """Return the scores of a weight, without a graph."""
        values, state, layout = self._stored(name)
        weight = values.detach()
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
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
