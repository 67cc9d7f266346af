"""Masks: which weights to keep, by magnitude, exactly and over all stages of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_axosparse.pruning.together import all_gather, all_sum

Scope = Literal["global", "layer"]

_DIGIT = 16
"""Bits of a magnitude that one pass over the weights settles."""


def prunable(module: nn.Module, exclude: Iterable[str] = ()) -> dict[str, torch.Size]:
    """The parameters that can be pruned, with their shapes, in module order.

    These are all floating parameters with at least two dimensions (no biases, no norms), tied ones
    once, those on the meta device included.

    Args:
        module: the whole model.
        exclude: patterns (as in :mod:`fnmatch`) of parameter names to leave dense.
    """
    patterns = tuple(exclude)
    return {
        name: parameter.shape
        for name, parameter in module.named_parameters()
        if parameter.dim() >= 2
        and parameter.is_floating_point()
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def magnitude_masks(
    parameters: Mapping[str, Tensor],
    counted: Collection[str],
    sizes: Mapping[str, torch.Size],
    ratio: float,
    scope: Scope = "global",
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Masks that prune the entries of least magnitude, the same as one process would find.

    No weights travel: the threshold is found by a radix select on the bit patterns of the
    magnitudes, whose histograms are summed over the ranks. Among entries of equal magnitude the
    first in module order are pruned first, so exactly ``round(ratio * entries)`` go.

    Args:
        parameters: the weights this rank holds, by name; names not in ``sizes`` are left out.
        counted: the names this rank answers for; each name has exactly one such rank in ``group``.
        sizes: every prunable name of the whole model with its shape, in module order.
        ratio: share of entries to prune, in [0, 1).
        scope: "global": one threshold for the whole model; "layer": one for each parameter.
        group: the ranks that hold the model together, or None where this rank holds all of it.

    Returns:
        name -> bool tensor, True where an entry is kept, for each prunable parameter held here.

    Raises:
        ValueError: on every rank, if some weight is NaN (the message names the parameter), if the
            counted names are not the whole model, or for a ratio outside [0, 1).
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"The pruning ratio must be in [0, 1), got {ratio}.")
    held = {name: parameters[name].detach() for name in sizes if name in parameters}
    wide = _agree(held, counted, sizes, group)
    if scope == "layer":
        return {
            name: _masks({name: weight}, {name: weight.shape}, {name}, ratio, wide, None)[name]
            for name, weight in held.items()
        }
    return _masks(held, sizes, counted, ratio, wide, group)


def _agree(
    held: Mapping[str, Tensor],
    counted: Collection[str],
    sizes: Mapping[str, torch.Size],
    group: ProcessGroup | None,
) -> bool:
    """Check the weights, on all ranks alike, and find out whether any of them is float64."""
    wide = any(weight.dtype == torch.float64 for weight in held.values())
    nan = [name for name, weight in held.items() if weight.isnan().any()]
    mine = [name for name in held if name in counted]
    facts = all_gather((wide, nan, mine), group)
    diverged = list(dict.fromkeys(name for _, nan, _ in facts for name in nan))
    if diverged:
        raise ValueError(
            f"Weights are NaN in {', '.join(diverged)}: there are no magnitudes to prune by. "
            "Training has diverged; look at the learning rate or the precision."
        )
    answered = Counter(name for _, _, mine in facts for name in mine)
    wrong = [name for name in sizes if answered[name] != 1]
    if wrong:
        raise ValueError(f"Not counted by exactly one rank: {', '.join(wrong)}.")
    return any(wide for wide, _, _ in facts)


def _masks(
    held: Mapping[str, Tensor],
    sizes: Mapping[str, torch.Size],
    counted: Collection[str],
    ratio: float,
    wide: bool,
    group: ProcessGroup | None,
) -> dict[str, Tensor]:
    """The masks of ``held`` with one threshold for everything in ``sizes``."""
    pruned = round(ratio * sum(size.numel() for size in sizes.values()))
    if pruned == 0:
        return {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in held.items()}
    own = {name: weight for name, weight in held.items() if name in counted}
    threshold, tied = _select(own.values(), pruned, wide, group)
    before = _tied_before(own, sizes, threshold, wide, group)
    return {
        name: _above(_magnitude(weight, wide), threshold, tied - before[name]).view(weight.shape)
        for name, weight in held.items()
    }


def _magnitude(weight: Tensor, wide: bool) -> Tensor:
    """Integers in the order of the absolute values: their bit patterns as floats. Flattened."""
    magnitude = weight.reshape(-1).abs()
    if wide:
        return magnitude.to(torch.float64).view(torch.int64)
    return magnitude.to(torch.float32).view(torch.int32)


def _select(
    weights: Collection[Tensor], rank: int, wide: bool, group: ProcessGroup | None
) -> tuple[int, int]:
    """The ``rank``-th smallest magnitude, and how many entries of just that magnitude to prune.

    Radix select from the most significant digit on: each pass counts the next digit among the
    magnitudes that begin with the digits found so far.
    """
    prefix: int | None = None
    for shift in range((64 if wide else 32) - _DIGIT, -1, -_DIGIT):
        histogram = torch.zeros(2**_DIGIT, dtype=torch.int64)
        for weight in weights:
            histogram += _histogram(_magnitude(weight, wide), prefix, shift)
        cumulated = all_sum(histogram, group).cumsum(0)
        digit = int(torch.searchsorted(cumulated, rank))
        rank -= int(cumulated[digit - 1]) if digit else 0
        prefix = ((prefix or 0) << _DIGIT) | digit
    return prefix or 0, rank


def _histogram(magnitude: Tensor, prefix: int | None, shift: int) -> Tensor:
    """How often each digit, ``shift`` bits up, follows ``prefix``; on CPU."""
    if prefix is not None:
        magnitude = magnitude[magnitude >> (shift + _DIGIT) == prefix]
    digits = (magnitude >> shift) & (2**_DIGIT - 1)
    return torch.bincount(digits, minlength=2**_DIGIT).cpu()


def _tied_before(
    own: Mapping[str, Tensor],
    sizes: Mapping[str, torch.Size],
    threshold: int,
    wide: bool,
    group: ProcessGroup | None,
) -> dict[str, int]:
    """For each name, the number of entries at the threshold in the parameters before it."""
    counts = torch.zeros(len(sizes), dtype=torch.int64)
    for position, name in enumerate(sizes):
        if name in own:
            counts[position] = (_magnitude(own[name], wide) == threshold).sum()
    before = all_sum(counts, group).cumsum(0) - counts
    return dict(zip(sizes, before.tolist(), strict=True))


def _above(magnitude: Tensor, threshold: int, tied: int) -> Tensor:
    """True where ``magnitude`` is kept: above the threshold, or at it but not among the first."""
    kept = magnitude >= threshold
    if tied > 0:
        kept[(magnitude == threshold).nonzero()[:tied, 0]] = False
    return kept
