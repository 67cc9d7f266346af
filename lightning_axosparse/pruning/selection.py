"""Computes the masks of the entries of highest score, over all stages of a pipeline.

Scores never leave their rank: a radix select finds the exact threshold from histograms that are
summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Size, Tensor
from torch.distributed import ProcessGroup

from lightning_axosparse.distributed.process_groups import all_gather, all_sum
from lightning_axosparse.support.troubleshooting import see

Sizes = Mapping[str, Size]
"""The shape of every weight that is pruned, by name, in module order."""

Read = Callable[[str], Tensor]
"""Returns the scores of a weight, or their keys, by its name. They are computed at each call, so
that those of all weights are never in memory at once."""


def unpruned_count(sizes: Sizes, ratio: float) -> int:
    """Return the number of unpruned entries if a fraction ``ratio``, in [0, 1), is pruned."""
    if not 0 <= ratio < 1:
        raise ValueError(f"The pruning ratio must be in [0, 1), got {ratio}." + see("pruning"))
    entries = number_of_entries(sizes)
    return entries - round(ratio * entries)


def number_of_entries(sizes: Sizes) -> int:
    """Return the number of entries of all weights."""
    return sum(size.numel() for size in sizes.values())


def minimum_counts(sizes: Sizes, k: int, floor: float) -> dict[str, int]:
    """Return how many entries of each weight are unpruned at least, whatever their scores.

    They are the fraction ``floor`` of its entries if ``k`` entries were spread evenly over all.
    """
    fraction = floor * k / max(1, number_of_entries(sizes))
    return {name: int(fraction * size.numel()) for name, size in sizes.items()}


_DIGIT = 16
"""Bits of a score that one pass of the radix select resolves."""


def top_k_masks(
    names: Collection[str],
    scores: Read,
    sizes: Sizes,
    k: int,
    minimum: Mapping[str, int] | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Compute the masks of the ``k`` entries of highest score, as one process would.

    Of entries with equal scores the first in module order are pruned first. A score that is NaN or
    cannot be computed is a ValueError on every rank, which names the weight.

    Args:
        names: the weights that this rank counts. Each is counted by exactly one rank of ``group``.
        scores: returns the scores of one of them; called several times.
        sizes: all weights, the same on all ranks.
        k: the number of unpruned entries, of all weights.
        minimum: the least number of unpruned entries of each weight, together no more than ``k``;
            None: zero.
        group: the ranks whose stages make up the model; None if this rank has the full model.
    """
    double = _validate(names, scores, group)
    floors: dict[str, tuple[int, int]] = {}

    def keys(name: str) -> Tensor:
        computed = _keys(scores(name), double)
        if name in floors:
            computed[_above(computed, *floors[name])] = torch.iinfo(computed.dtype).max
        return computed

    for name in names:
        if minimum and minimum.get(name):
            own = {name: keys(name)}
            below = own[name].numel() - minimum[name]
            floors[name] = _select(own, own.__getitem__, below, double, None)
    pruned = number_of_entries(sizes) - k
    if pruned == 0:
        return {
            name: torch.ones_like(keys(name), dtype=torch.bool).view(sizes[name]) for name in names
        }
    threshold, ties = _select(names, keys, pruned, double, group)
    before = _ties_before(names, keys, sizes, threshold, group)
    return {
        name: _above(keys(name), threshold, ties - before[name]).view(sizes[name]) for name in names
    }


def _keys(scores: Tensor, double: bool) -> Tensor:
    """Return scores as integers of the same order, 1-D, of 64 bits if ``double``, else of 32."""
    scores = scores.detach().reshape(-1)
    # Zeros of both signs are equal.
    if double:
        bits = (scores.to(torch.float64) + 0.0).view(torch.int64)
    else:
        bits = (scores.to(torch.float32) + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _validate(names: Collection[str], scores: Read, group: ProcessGroup | None) -> bool:
    """Validate the scores of all ranks; return whether any of them are float64."""
    double, problems = False, []
    for name in names:
        try:
            values = scores(name)
        except ValueError as error:
            problems.append(str(error))
            continue
        double |= values.dtype == torch.float64
        if values.isnan().any():
            problems.append(
                f"Scores are NaN in {name}, so its entries cannot be ranked. If training has "
                "diverged, look at the learning rate or the precision." + see("pruning")
            )
    gathered = all_gather((double, problems), group)
    messages = dict.fromkeys(problem for _, problems in gathered for problem in problems)
    if messages:
        raise ValueError("\n".join(messages))
    return any(double for double, _ in gathered)


def _select(
    names: Collection[str], keys: Read, k: int, double: bool, group: ProcessGroup | None
) -> tuple[int, int]:
    """Return the ``k``-th smallest key, and how many entries equal to it to prune.

    A radix select from the most significant digit on, which has the sign: each pass counts the next
    digit of the keys that begin with the digits selected so far.
    """
    prefix: int | None = None
    for shift in range((64 if double else 32) - _DIGIT, -1, -_DIGIT):
        histogram = torch.zeros(2**_DIGIT, dtype=torch.int64)
        for name in names:
            histogram += _histogram(keys(name), prefix, shift)
        cumulated = all_sum(histogram, group).cumsum(0)
        digit = int(torch.searchsorted(cumulated, k))
        k -= int(cumulated[digit - 1]) if digit else 0
        prefix = digit - 2 ** (_DIGIT - 1) if prefix is None else (prefix << _DIGIT) | digit
    assert prefix is not None
    return prefix, k


def _histogram(keys: Tensor, prefix: int | None, shift: int) -> Tensor:
    """Count each digit at bit ``shift`` of the keys that begin with ``prefix``; on CPU."""
    if prefix is None:
        digits = (keys >> shift) + 2 ** (_DIGIT - 1)
    else:
        digits = (keys[keys >> (shift + _DIGIT) == prefix] >> shift) & (2**_DIGIT - 1)
    return torch.bincount(digits, minlength=2**_DIGIT).cpu()


def _ties_before(
    names: Collection[str], keys: Read, sizes: Sizes, threshold: int, group: ProcessGroup | None
) -> dict[str, int]:
    """Count, for each name, the entries equal to the threshold in the weights before it."""
    local = {name: int((keys(name) == threshold).sum()) for name in names}
    counts = torch.tensor([local.get(name, 0) for name in sizes])
    before = all_sum(counts, group).cumsum(0) - counts
    return dict(zip(sizes, before.tolist(), strict=True))


def _above(keys: Tensor, threshold: int, ties: int) -> Tensor:
    """Return True for each entry above the threshold, or equal to it but not of the first ties."""
    mask = keys >= threshold
    if ties > 0:
        mask[(keys == threshold).nonzero()[:ties, 0]] = False
    return mask
