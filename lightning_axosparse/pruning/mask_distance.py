"""Measures the distance between two sets of masks.

The early-bird paper (You et al., ICLR 2020) takes the fraction of mask entries that differ, with
0.1 as the threshold, for channels pruned by up to 0.7. At higher ratios this distance says little:
two independent random masks that keep 5% differ in 9.5% of their entries and would pass. The
overlap distance divides by the kept entries instead, so it ranges from 0 (equal masks) to 1 (no
kept entry in common) at every ratio; at ratio 0.5 the two distances are equal. Of the entries that
independent masks keep, a fraction as large as the pruning ratio differs: the relative distance
divides by it, so one threshold tells masks that settle from independent ones at every ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_axosparse.distributed.process_groups import all_sum

Masks = Mapping[str, Tensor]


def overlap_distance(
    one: Masks, other: Masks, counted: Collection[str], group: ProcessGroup | None = None
) -> float:
    """Return the fraction of kept entries that ``one`` and ``other`` do not have in common.

    This is one minus the Sorensen-Dice coefficient: ``1 - 2 |A and B| / (|A| + |B|)``, in [0, 1].
    For masks that keep equally many entries it is the fraction of them that changed.

    Args:
        one: name -> bool tensor, True where an entry is kept, of the parameters on this rank.
        other: the same names and shapes.
        counted: the names that this rank counts; each name is counted by exactly one rank of
            ``group``.
        group: the ranks whose stages make up the model; None if this rank has the whole model.
    """
    differing, kept, _ = _counts(one, other, counted, group)
    return differing / kept if kept else 0.0


def relative_distance(
    one: Masks, other: Masks, counted: Collection[str], group: ProcessGroup | None = None
) -> float:
    """Return the :func:`overlap_distance`, divided by that of independent random masks.

    It is 0 for equal masks and 1, in the mean, for independent ones that keep as many entries.
    Arguments as for :func:`overlap_distance`.
    """
    differing, kept, entries = _counts(one, other, counted, group)
    expected = kept * (1 - kept / (2 * entries)) if entries else 0.0
    return differing / expected if expected else 0.0


def hamming_distance(
    one: Masks, other: Masks, counted: Collection[str], group: ProcessGroup | None = None
) -> float:
    """Return the fraction of all entries in which ``one`` and ``other`` differ, as in the paper.

    At pruning ratio p it is at most ``2 min(p, 1 - p)``. Arguments as for :func:`overlap_distance`.
    """
    differing, _, entries = _counts(one, other, counted, group)
    return differing / entries if entries else 0.0


Distance = Literal["relative", "overlap", "hamming"]
DISTANCES: dict[Distance, Callable[[Masks, Masks, Collection[str], ProcessGroup | None], float]]
DISTANCES = {
    "relative": relative_distance,
    "overlap": overlap_distance,
    "hamming": hamming_distance,
}


def _counts(
    one: Masks, other: Masks, counted: Collection[str], group: ProcessGroup | None
) -> list[int]:
    """Count entries: those that differ, those kept by ``one`` plus those by ``other``, and all."""
    counts = torch.zeros(3, dtype=torch.int64)
    for name in one:
        if name in counted:
            a, b = one[name], other[name]
            counts += torch.tensor([int((a ^ b).sum()), int(a.sum() + b.sum()), a.numel()])
    summed: list[int] = all_sum(counts, group).tolist()
    return summed
