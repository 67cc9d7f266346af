"""Ways to choose the entries of a weight that are tried beside those of the package."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_axosparse.pruning.scores import Score, State


def even(weight: Tensor, state: State) -> Tensor:
    """Return magnitudes relative to those of their row and column, so that none becomes empty."""
    scores = weight.abs()
    for _ in range(5):
        scores = scores / scores.mean(1, keepdim=True).clamp_min(1e-30)
        scores = scores / scores.mean(0, keepdim=True).clamp_min(1e-30)
    return scores


def lots(weight: Tensor, state: State) -> Tensor:
    """Return random scores, of which the highest are drawn with odds in proportion to magnitude.

    Efraimidis & Spirakis, Information Processing Letters 2006; the same random numbers each time.
    """
    generator = torch.Generator().manual_seed(weight.numel())
    chance = torch.rand(weight.shape, generator=generator).clamp_min(1e-9)
    return weight.abs().clamp_min(1e-30).log() - (-chance.log()).log()


TRIED: dict[str, Score] = {"even": even, "lots": lots}
