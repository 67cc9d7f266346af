"""Decides how many entries each weight of a model keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Size

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

    Attributes:
        sizes: name -> shape of each weight.
        kept: how many of all these entries are kept.
        floor: the least density of a weight.
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
