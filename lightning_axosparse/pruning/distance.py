"""Distance: how far two sets of masks are apart.

The early-bird paper (You et al., ICLR 2020) takes the share of mask entries that differ, with 0.1
as the limit. It was made for channels pruned by up to 0.7. On weights pruned further it says
little: two independent random masks that keep 5% differ in 9.5% of their entries and would pass.
The overlap distance measures the same difference against the kept entries alone, so it runs from 0
(the same) to 1 (nothing in common) at every ratio; at ratio 0.5 the two are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_axosparse.pruning.together import all_sum

Masks = Mapping[str, Tensor]


def overlap_distance(
    one: Masks, other: Masks, counted: Collection[str], group: ProcessGroup | None = None
) -> float:
    """The share of kept entries that ``one`` and ``other`` do not have in common.

    One less the Sorensen-Dice coefficient: ``1 - 2 |A and B| / (|A| + |B|)``, in [0, 1]. For sets
    of equal size it is the share of kept entries that were exchanged.

    Args:
        one: name -> bool tensor, True where an entry is kept; those that this rank holds.
        other: the same names and shapes.
        counted: the names this rank answers for; each name has exactly one such rank in ``group``.
        group: the ranks that hold the masks together, or None where this rank holds all of them.
    """
    differing, kept, _ = _counts(one, other, counted, group)
    return differing / kept if kept else 0.0


def hamming_distance(
    one: Masks, other: Masks, counted: Collection[str], group: ProcessGroup | None = None
) -> float:
    """The share of all entries in which ``one`` and ``other`` differ: the paper's mask distance.

    At pruning ratio p it is at most ``2 min(p, 1 - p)``. Arguments as for :func:`overlap_distance`.
    """
    differing, _, entries = _counts(one, other, counted, group)
    return differing / entries if entries else 0.0


Distance = Literal["overlap", "hamming"]
DISTANCES: dict[Distance, Callable[[Masks, Masks, Collection[str], ProcessGroup | None], float]]
DISTANCES = {"overlap": overlap_distance, "hamming": hamming_distance}


def _counts(
    one: Masks, other: Masks, counted: Collection[str], group: ProcessGroup | None
) -> list[int]:
    """Entries that differ, entries kept in ``one`` plus those kept in ``other``, all entries."""
    counts = torch.zeros(3, dtype=torch.int64)
    for name in one:
        if name in counted:
            a, b = one[name], other[name]
            counts += torch.tensor([int((a ^ b).sum()), int(a.sum() + b.sum()), a.numel()])
    summed: list[int] = all_sum(counts, group).tolist()
    return summed
