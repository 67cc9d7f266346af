"""Computes masks that keep the entries of highest score, over all stages of a pipeline.

How many entries each weight keeps is decided first, by the scope. Scores never leave their rank: a
radix select finds the exact threshold from histograms that are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Size, Tensor
from torch.distributed import ProcessGroup

from lightning_axosparse.distributed.process_groups import all_gather, all_sum
from lightning_axosparse.pruning.prunable import few
from lightning_axosparse.support.troubleshooting import see

Scope = Literal["global", "layer", "uniform-stage"] | Mapping[str, float]
"""How weights share what is kept: see :func:`shares`."""

SCOPES = ("global", "layer", "uniform-stage")

Stages = Mapping[str, Collection[int]]
"""The pipeline stages that hold each weight, by name."""


@dataclass(frozen=True)
class Share:
    """Weights whose entries are ranked together.

    ``kept`` of all their entries are kept, and of each weight at least the fraction ``floor``.
    """

    sizes: Mapping[str, Size]
    kept: int
    floor: float = 0.0

    @property
    def entries(self) -> int:
        """The number of entries of all weights."""
        return sum(size.numel() for size in self.sizes.values())

    def least(self, name: str) -> int:
        """Return how many entries of a weight are kept whatever their rank."""
        return int(self.floor * self.sizes[name].numel())


def shares(
    sizes: Mapping[str, Size],
    ratio: float,
    scope: Scope = "global",
    floor: float = 0.0,
    stages: Stages | None = None,
) -> list[Share]:
    """Divide the entries that are kept among the weights.

    Args:
        sizes: name -> shape of every weight that is pruned, in module order.
        ratio: fraction of all entries to prune, in [0, 1).
        scope: "global": all weights are ranked together. "layer": each weight keeps the same
            fraction. "uniform-stage": the weights of each pipeline stage are ranked together, and
            each stage keeps the same fraction. A mapping of patterns of names to the fractions that
            these weights keep: the last that matches counts, and the other weights are ranked
            together.
        floor: where several weights are ranked together, each keeps at least this fraction, in
            [0, 1], of what it would keep if all kept the same fraction.
        stages: name -> the stages that hold each weight, for "uniform-stage", which counts it for
            the first of them.

    Raises:
        ValueError: if ``ratio`` and ``scope`` contradict each other, or a pattern matches no
            weight.
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"The pruning ratio must be in [0, 1), got {ratio}." + see("pruning"))
    if isinstance(scope, Mapping):
        return _with_rest(sizes, ratio, _given(sizes, scope), floor)
    if scope == "layer":
        return [_ranked({name: size}, ratio) for name, size in sizes.items()]
    ranked: dict[int, dict[str, Size]] = {}
    for name, size in sizes.items():
        stage = min(stages[name]) if scope == "uniform-stage" and stages is not None else 0
        ranked.setdefault(stage, {})[name] = size
    return [_ranked(ranked[stage], ratio, floor) for stage in sorted(ranked)]


def _ranked(sizes: Mapping[str, Size], ratio: float, floor: float = 0.0) -> Share:
    entries = sum(size.numel() for size in sizes.values())
    kept = entries - round(ratio * entries)
    return Share(sizes, kept, floor * kept / max(1, entries))


def _with_rest(
    sizes: Mapping[str, Size], ratio: float, kept: Mapping[str, int], floor: float
) -> list[Share]:
    """Shares of the weights in ``kept``, each alone, and one of all others."""
    alone = [Share({name: sizes[name]}, count) for name, count in kept.items()]
    rest = {name: size for name, size in sizes.items() if name not in kept}
    entries = sum(size.numel() for size in sizes.values())
    given, left = sum(kept.values()), sum(size.numel() for size in rest.values())
    wanted = entries - round(ratio * entries) - given
    if rest and 0 <= wanted <= left:
        return [*alone, _ranked(rest, 1 - wanted / left, floor)]
    # The given densities, and the ratio that follows from them, are rounded.
    if not rest and abs(wanted) <= max(len(kept), 1e-3 * entries):
        return alone
    raise ValueError(
        f"The densities in scope keep {given} entries, so the {left} entries of the other "
        f"{len(rest)} weights would have to keep {wanted} to prune {ratio:.4g} of all {entries}. "
        f"Change the densities or the pruning ratio; all by themselves they prune "
        f"{1 - (given + left) / entries:.4f} to {1 - given / entries:.4f}." + see("pruning")
    )


def _given(sizes: Mapping[str, Size], densities: Mapping[str, float]) -> dict[str, int]:
    """The entries that the weights keep whose names match a pattern."""
    for pattern in densities:
        if not any(fnmatchcase(name, pattern) for name in sizes):
            raise ValueError(
                f"scope={{'{pattern}': ...}}: '{pattern}' matches no weight that is pruned. There "
                f"are: {few(list(sizes))}." + see("pruning")
            )
    found = {
        name: [density for pattern, density in densities.items() if fnmatchcase(name, pattern)]
        for name in sizes
    }
    return {
        name: round(matching[-1] * sizes[name].numel())
        for name, matching in found.items()
        if matching
    }


_DIGIT = 16
"""Bits of a score that one pass of the radix select resolves."""


def highest(
    scores: Mapping[str, Tensor], shares: Sequence[Share], group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Compute the masks that keep the entries of highest score, as one process would.

    Of entries with equal scores the first in module order are pruned first, so each share keeps
    exactly as many entries as it says. ``scores`` are those of the weights that this rank counts,
    and are read several times; each weight is counted by exactly one rank of ``group``, and the
    shares are the same on all. A score that is NaN or cannot be computed is a ValueError on every
    rank, which names the weight.
    """
    double = _validate(scores, group)
    masks: dict[str, Tensor] = {}
    for share in shares:
        masks.update(_of_share(_Keys(scores, share, double), group))
    shapes = {name: size for share in shares for name, size in share.sizes.items()}
    return {name: masks[name].view(shapes[name]) for name in scores}


class _Keys(Mapping[str, Tensor]):
    """The scores of the weights of one share on this rank, as integers of the same order.

    The highest entries of each weight, as many as the share's floor, have the largest integer.
    With ``double`` the integers have 64 bits, not 32.
    """

    def __init__(self, scores: Mapping[str, Tensor], share: Share, double: bool) -> None:
        self.share, self.double = share, double
        self._scores = scores
        self._names = [name for name in share.sizes if name in scores]
        self._floors: dict[str, tuple[int, int]] = {}
        for name in self:
            least = share.least(name)
            if least:
                alone = {name: self[name]}
                self._floors[name] = _select(alone, alone[name].numel() - least, double, None)

    def __getitem__(self, name: str) -> Tensor:
        scores = self._scores[name].detach().reshape(-1)
        # Zeros of both signs are equal.
        if self.double:
            bits = (scores.to(torch.float64) + 0.0).view(torch.int64)
        else:
            bits = (scores.to(torch.float32) + 0.0).view(torch.int32)
        largest = torch.iinfo(bits.dtype).max
        keys = torch.where(bits < 0, bits ^ largest, bits)
        if name in self._floors:
            keys[_above(keys, *self._floors[name])] = largest
        return keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _validate(scores: Mapping[str, Tensor], group: ProcessGroup | None) -> bool:
    """Validate the scores of all ranks; return whether any of them are float64."""
    double, problems = False, []
    for name in scores:
        try:
            values = scores[name]
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
    found = list(dict.fromkeys(problem for _, problems in gathered for problem in problems))
    if found:
        raise ValueError("\n".join(found))
    return any(double for double, _ in gathered)


def _of_share(keys: _Keys, group: ProcessGroup | None) -> dict[str, Tensor]:
    """Compute the flat masks of a share; collective, unless it has one weight."""
    share = keys.share
    if len(share.sizes) == 1:
        group = None
        if not keys:
            return {}
    pruned = share.entries - share.kept
    if pruned == 0:
        return {name: torch.ones_like(keys[name], dtype=torch.bool) for name in keys}
    threshold, ties = _select(keys, pruned, keys.double, group)
    before = _ties_before(keys, threshold, group)
    return {name: _above(keys[name], threshold, ties - before[name]) for name in keys}


def _select(
    keys: Mapping[str, Tensor], k: int, double: bool, group: ProcessGroup | None
) -> tuple[int, int]:
    """Return the ``k``-th smallest key, and how many entries equal to it to prune.

    A radix select from the most significant digit on, which has the sign: each pass counts the next
    digit of the keys that begin with the digits found so far.
    """
    prefix: int | None = None
    for shift in range((64 if double else 32) - _DIGIT, -1, -_DIGIT):
        histogram = torch.zeros(2**_DIGIT, dtype=torch.int64)
        for name in keys:
            histogram += _histogram(keys[name], prefix, shift)
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


def _ties_before(keys: _Keys, threshold: int, group: ProcessGroup | None) -> dict[str, int]:
    """Count, for each name, the entries equal to the threshold in the weights before it."""
    own = {name: int((keys[name] == threshold).sum()) for name in keys}
    counts = torch.tensor([own.get(name, 0) for name in keys.share.sizes])
    before = all_sum(counts, group).cumsum(0) - counts
    return dict(zip(keys.share.sizes, before.tolist(), strict=True))


def _above(keys: Tensor, threshold: int, ties: int) -> Tensor:
    """Return True for each entry above the threshold, or equal to it but not of the first ties."""
    kept = keys >= threshold
    if ties > 0:
        kept[(keys == threshold).nonzero()[:ties, 0]] = False
    return kept
