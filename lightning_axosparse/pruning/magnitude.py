"""Computes masks that keep the weights of largest magnitude, over all stages of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_axosparse.distributed.process_groups import all_gather, all_sum

Scope = Literal["global", "layer"]

_DIGIT = 16
"""Bits of a magnitude that one pass of the radix select resolves."""


def prunable(module: nn.Module, exclude: Iterable[str] = ()) -> dict[str, torch.Size]:
    """Return the parameters that can be pruned, with their shapes, in module order.

    These are all floating-point parameters with at least two dimensions (no biases, no norms).
    Tied parameters appear once; parameters on the meta device are included.

    Args:
        module: the whole model.
        exclude: patterns (as in :mod:`fnmatch`) of the parameter names to leave dense.
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
    """Compute the masks that prune the entries of smallest magnitude, as one process would.

    Ranks exchange no weights: the threshold is found by a radix select on the bit patterns of the
    magnitudes, and only its histograms are summed over the ranks. Of entries with equal magnitude
    the first in module order are pruned first, so exactly ``round(ratio * entries)`` are pruned.

    Args:
        parameters: name -> weight on this rank; names that are not in ``sizes`` are ignored.
        counted: the names that this rank counts; each name is counted by exactly one rank of
            ``group``.
        sizes: name -> shape of every prunable parameter of the whole model, in module order.
        ratio: fraction of the entries to prune, in [0, 1).
        scope: "global": one threshold for the whole model; "layer": one for each parameter.
        group: the ranks whose stages make up the model; None if this rank has the whole model.

    Returns:
        name -> bool tensor, True where an entry is kept, for each prunable parameter on this rank.

    Raises:
        ValueError: on every rank, if a weight is NaN (the message names the parameter), if a name
            is not counted by exactly one rank, or for a ratio outside [0, 1).
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"The pruning ratio must be in [0, 1), got {ratio}.")
    held = {name: parameters[name].detach() for name in sizes if name in parameters}
    double = _validate(held, counted, sizes, group)
    if scope == "layer":
        return {
            name: _masks({name: weight}, {name: weight.shape}, {name}, ratio, double, None)[name]
            for name, weight in held.items()
        }
    return _masks(held, sizes, counted, ratio, double, group)


def _validate(
    held: Mapping[str, Tensor],
    counted: Collection[str],
    sizes: Mapping[str, torch.Size],
    group: ProcessGroup | None,
) -> bool:
    """Validate the weights of all ranks; return whether any of them is float64."""
    double = any(weight.dtype == torch.float64 for weight in held.values())
    nan = [name for name, weight in held.items() if weight.isnan().any()]
    own = [name for name in held if name in counted]
    gathered = all_gather((double, nan, own), group)
    diverged = list(dict.fromkeys(name for _, nan, _ in gathered for name in nan))
    if diverged:
        raise ValueError(
            f"Weights are NaN in {', '.join(diverged)}: there are no magnitudes to prune by. "
            "Training has diverged; look at the learning rate or the precision."
        )
    times_counted = Counter(name for _, _, own in gathered for name in own)
    wrong = [name for name in sizes if times_counted[name] != 1]
    if wrong:
        raise ValueError(f"Not counted by exactly one rank: {', '.join(wrong)}.")
    return any(double for double, _, _ in gathered)


def _masks(
    held: Mapping[str, Tensor],
    sizes: Mapping[str, torch.Size],
    counted: Collection[str],
    ratio: float,
    double: bool,
    group: ProcessGroup | None,
) -> dict[str, Tensor]:
    """Compute the masks of ``held`` with one threshold for all parameters in ``sizes``."""
    pruned = round(ratio * sum(size.numel() for size in sizes.values()))
    if pruned == 0:
        return {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in held.items()}
    own = {name: weight for name, weight in held.items() if name in counted}
    threshold, ties = _select(own.values(), pruned, double, group)
    before = _ties_before(own, sizes, threshold, double, group)
    return {
        name: _above(_magnitude(weight, double), threshold, ties - before[name]).view(weight.shape)
        for name, weight in held.items()
    }


def _magnitude(weight: Tensor, double: bool) -> Tensor:
    """Return the bit patterns of the absolute values, flattened: integers of the same order."""
    magnitude = weight.reshape(-1).abs()
    if double:
        return magnitude.to(torch.float64).view(torch.int64)
    return magnitude.to(torch.float32).view(torch.int32)


def _select(
    weights: Collection[Tensor], k: int, double: bool, group: ProcessGroup | None
) -> tuple[int, int]:
    """Return the ``k``-th smallest magnitude, and how many entries equal to it to prune.

    A radix select from the most significant digit on: each pass counts the next digit of the
    magnitudes that begin with the digits found so far.
    """
    prefix: int | None = None
    for shift in range((64 if double else 32) - _DIGIT, -1, -_DIGIT):
        histogram = torch.zeros(2**_DIGIT, dtype=torch.int64)
        for weight in weights:
            histogram += _histogram(_magnitude(weight, double), prefix, shift)
        cumulated = all_sum(histogram, group).cumsum(0)
        digit = int(torch.searchsorted(cumulated, k))
        k -= int(cumulated[digit - 1]) if digit else 0
        prefix = ((prefix or 0) << _DIGIT) | digit
    return prefix or 0, k


def _histogram(magnitude: Tensor, prefix: int | None, shift: int) -> Tensor:
    """Count each digit at bit ``shift`` of the magnitudes that begin with ``prefix``; on CPU."""
    if prefix is not None:
        magnitude = magnitude[magnitude >> (shift + _DIGIT) == prefix]
    digits = (magnitude >> shift) & (2**_DIGIT - 1)
    return torch.bincount(digits, minlength=2**_DIGIT).cpu()


def _ties_before(
    own: Mapping[str, Tensor],
    sizes: Mapping[str, torch.Size],
    threshold: int,
    double: bool,
    group: ProcessGroup | None,
) -> dict[str, int]:
    """Count, for each name, the entries equal to the threshold in the parameters before it."""
    counts = torch.zeros(len(sizes), dtype=torch.int64)
    for position, name in enumerate(sizes):
        if name in own:
            counts[position] = (_magnitude(own[name], double) == threshold).sum()
    before = all_sum(counts, group).cumsum(0) - counts
    return dict(zip(sizes, before.tolist(), strict=True))


def _above(magnitude: Tensor, threshold: int, ties: int) -> Tensor:
    """Return True for each entry above the threshold, or equal to it but not of the first ties."""
    kept = magnitude >= threshold
    if ties > 0:
        kept[(magnitude == threshold).nonzero()[:ties, 0]] = False
    return kept
