"""Drops the smallest kept entries of weights and keeps as many others instead."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Literal

import torch
from torch import Tensor

from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.pruning.rule import Score, State, Stored, scores_of
from lightning_axosparse.pruning.selection import top_k_masks

Growth = Literal["random", "gradient"]
"""Which entries grow: any (SET), or those of the largest gradient (RigL)."""


def regrown(
    weights: Mapping[str, Tensor],
    masks: MaskBits,
    fraction: float,
    growth: Growth,
    seed: int,
) -> dict[str, Tensor]:
    """Drop the smallest kept entries of each weight, and let as many others grow.

    Entries that have just been dropped may grow again, and keep their values then. SET (Mocanu et
    al., Nature Communications 2018) grows entries at random, RigL (Evci et al., ICML 2020) those of
    the largest gradient.

    Args:
        weights: name -> weight, of which some may not be pruned, with the
            gradient of all entries for "gradient". A weight without a gradient counts as one of
            zeros.
        masks: the masks of the whole model.
        fraction: how many of the kept entries of each weight are dropped, from 0 to 1.
        growth: "random" or "gradient".
        seed: makes "random" repeatable.

    Returns:
        name -> the new mask of each pruned weight in ``weights``; it keeps as many entries as the
        old one.

    Raises:
        ValueError: if an unpruned weight is NaN.
    """
    own = {name: weights[name] for name in masks if name in weights}
    numbers = {name: number for number, name in enumerate(sorted(masks))}
    kept = {name: int(mask.sum()) for name, mask in masks.items()}
    left = {name: count - int(fraction * count) for name, count in kept.items()}
    old = {name: {"kept": masks[name].to(weight.device)} for name, weight in own.items()}
    survivors = _masks(_magnitude, own, old, left)
    new: dict[str, State] = {
        name: {
            "kept": survivors[name],
            "gradient": weight.grad,
            "seed": hash((seed, numbers[name])) % 2**63,
        }
        for name, weight in own.items()
    }
    return _masks(_GROWTH[growth], own, new, kept)


def _magnitude(weight: Tensor, state: State) -> Tensor:
    """The magnitudes of what is kept; all else is less."""
    return torch.where(state["kept"], weight.abs(), -1.0)


def _gradient(weight: Tensor, state: State) -> Tensor:
    """The magnitudes of the gradient, of which no entry exceeds one that survived.

    Loss scaling may make gradients overflow; such a step changes nothing but masks.
    """
    gradient = torch.zeros_like(weight) if state["gradient"] is None else state["gradient"]
    return torch.where(state["kept"], torch.inf, gradient.abs().nan_to_num(nan=0.0))


def by_chance(weight: Tensor, state: State) -> Tensor:
    """Return random numbers that ``state["seed"]`` fixes, the same on every device."""
    generator = torch.Generator().manual_seed(state["seed"])
    return torch.rand(weight.shape, generator=generator).to(weight.device)


def _random(weight: Tensor, state: State) -> Tensor:
    """Random numbers, of which none exceeds one that survived."""
    return torch.where(state["kept"], torch.inf, by_chance(weight, state))


_GROWTH: dict[Growth, Score] = {"gradient": _gradient, "random": _random}


def _masks(
    score: Score,
    weights: Mapping[str, Tensor],
    states: Mapping[str, State],
    kept: Mapping[str, int],
) -> dict[str, Tensor]:
    """Return the masks that keep the entries of highest score, so many of each weight."""
    masks = {}
    for name, weight in weights.items():
        alone = {name: scores_of(score, name, Stored(weight, states[name], None))}
        masks.update(top_k_masks(alone, alone.__getitem__, {name: weight.shape}, kept[name]))
    return masks


def cosine_fraction(fraction: float, progress: float) -> float:
    """Return the fraction of the kept entries to drop: ``fraction`` at first, 0 at the end.

    After Evci et al., *Rigging the Lottery* (ICML 2020, arXiv 1911.11134).
    """
    return fraction / 2 * (1 + cos(pi * progress))
