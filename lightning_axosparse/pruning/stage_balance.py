"""Limits how unevenly the stages of a pipeline share the entries that are kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import ceil

from torch import Size, Tensor
from torch.distributed import ProcessGroup

from lightning_axosparse.pruning.densities import Share, Stages
from lightning_axosparse.pruning.selection import highest, kept_of


def balanced(
    scores: Mapping[str, Tensor],
    share: Share,
    stages: Stages,
    imbalance: float,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Compute the masks of :func:`highest`, but let no stage keep much more than the mean.

    The masks are those of taking the entries by descending score, passing over those of stages
    that are full. Weights that several stages hold count for none: they keep what they would
    without the limit. Where the other stages have too few entries to keep as many, the limit is
    the least that there can be.

    Args:
        scores: as for :func:`highest`.
        share: all weights, and how many of their entries are kept.
        stages: name -> the stages that hold each weight; the same on all ranks.
        imbalance: the most kept entries of a stage over the mean of the stages, at least 1.
        group: as for :func:`highest`.

    Returns:
        As :func:`highest`.

    Raises:
        ValueError: as :func:`highest`.
    """
    shares = [share]
    while True:
        masks = highest(scores, shares, group)
        limited = limit_stages(share, kept_of(masks, share.sizes, group), stages, imbalance)
        if limited is None:
            return masks
        shares = limited


def limit_stages(
    share: Share, kept: Mapping[str, int], stages: Stages, imbalance: float
) -> list[Share] | None:
    """Fix the stages that keep too much at the most that they may keep.

    Args:
        share: all weights, and how many of their entries are kept.
        kept: name -> how many entries each weight keeps.
        stages: name -> the stages that hold each weight.
        imbalance: the most kept entries of a stage over the mean of the stages.

    Returns:
        Shares of the weights that several stages hold, of each full stage, and of all others; None
        if no stage keeps too much.
    """
    own: dict[int, dict[str, Size]] = {}
    common: dict[str, Size] = {}
    for name, size in share.sizes.items():
        weights = own.setdefault(min(stages[name]), {}) if len(stages[name]) == 1 else common
        weights[name] = size
    counts = kept_by_stage(kept, stages)
    total = sum(counts.values())
    limit = _limit([_entries(own[stage]) for stage in counts], total, imbalance)
    if max(counts.values(), default=0) <= limit:
        return None
    full = [stage for stage, count in counts.items() if count >= limit]
    others = {name: size for stage in own if stage not in full for name, size in own[stage].items()}
    parts = [
        (common, sum(kept[name] for name in common)),
        *((own[stage], limit) for stage in full),
        (others, total - len(full) * limit),
    ]
    return [
        Share(sizes, count, min(share.floor, count / _entries(sizes)))
        for sizes, count in parts
        if _entries(sizes)
    ]


def kept_by_stage(kept: Mapping[str, int], stages: Stages) -> dict[int, int]:
    """Sum what is kept over the weights that one stage alone holds, for each stage.

    Args:
        kept: name -> how many entries each pruned weight keeps.
        stages: name -> the stages that hold each weight.
    """
    counts: dict[int, int] = {}
    for name, count in kept.items():
        if len(stages[name]) == 1:
            stage = min(stages[name])
            counts[stage] = counts.get(stage, 0) + count
    return dict(sorted(counts.items()))


def _limit(entries: list[int], kept: int, imbalance: float) -> int:
    """The most that each stage may keep, where stages of ``entries`` keep ``kept`` in all."""
    least = ceil(imbalance * kept / max(1, len(entries)))
    possible = range(least, kept + 1)
    return least + bisect_left(possible, kept, key=lambda most: _room(entries, most))


def _room(entries: list[int], most: int) -> int:
    return sum(min(count, most) for count in entries)


def _entries(sizes: Mapping[str, Size]) -> int:
    return sum(size.numel() for size in sizes.values())
