"""Says which entries of a weight are kept or pruned together: N of every M inputs, or blocks.

A pattern sees each weight as (outputs, inputs, ...). It gives the scores of the units that are
ranked, and makes the mask of the entries of the mask of the units.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Size, Tensor, nn

from lightning_axosparse.pruning.prunable import few
from lightning_axosparse.sparse.parameters import Owner, owners
from lightning_axosparse.support.troubleshooting import see

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Layers whose weights are (inputs, outputs, ...), beside Hugging Face's ``Conv1D``."""


class Pattern(ABC):
    """How the entries of a weight make up units."""

    @property
    @abstractmethod
    def tile(self) -> tuple[int, int]:
        """The outputs and inputs that belong together; they have to divide the weight."""

    @abstractmethod
    def units(self, shape: Size) -> Size:
        """Return the shape of the units of a weight."""

    @abstractmethod
    def scores(self, scores: Tensor) -> Tensor:
        """Return the scores of the units, by those of the entries."""

    @abstractmethod
    def mask(self, units: Tensor) -> Tensor:
        """Return the mask of the entries, by that of the units."""


@dataclass(frozen=True)
class Entries(Pattern):
    """Every entry is kept or pruned by itself."""

    @property
    def tile(self) -> tuple[int, int]:
        """One output, one input."""
        return 1, 1

    def units(self, shape: Size) -> Size:
        """Return the shape of the weight."""
        return shape

    def scores(self, scores: Tensor) -> Tensor:
        """Return the scores of the entries."""
        return scores

    def mask(self, units: Tensor) -> Tensor:
        """Return the mask of the entries."""
        return units


@dataclass(frozen=True)
class Blocks(Pattern):
    """Blocks of so many outputs and inputs are kept or pruned by the sum of their scores."""

    rows: int
    columns: int

    @property
    def tile(self) -> tuple[int, int]:
        """The outputs and inputs of a block."""
        return self.rows, self.columns

    def units(self, shape: Size) -> Size:
        """Return how many blocks there are along each dimension."""
        outputs, inputs, *rest = shape
        return Size((outputs // self.rows, inputs // self.columns, *rest))

    def scores(self, scores: Tensor) -> Tensor:
        """Return the sums over blocks, in at least float32."""
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        columns: Tensor = wide.unflatten(1, (-1, self.columns)).sum(2)
        rows: Tensor = columns.unflatten(0, (-1, self.rows)).sum(1)
        return rows

    def mask(self, units: Tensor) -> Tensor:
        """Return each block's value for all of its entries."""
        return units.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)


@dataclass(frozen=True)
class NOfM(Pattern):
    """Of every M consecutive inputs of an output, the N of highest score are kept."""

    n: int
    m: int

    @property
    def tile(self) -> tuple[int, int]:
        """One output, M inputs."""
        return 1, self.m

    @property
    def ratio(self) -> float:
        """The fraction of every weight that is pruned."""
        return 1 - self.n / self.m

    def units(self, shape: Size) -> Size:
        """Return the shape of the weight."""
        return shape

    def scores(self, scores: Tensor) -> Tensor:
        """Return 1 for the entries to keep and 0 for the others; NaN where the score is.

        Of equal scores the first are pruned first.
        """
        groups = scores.unflatten(1, (-1, self.m))
        rank = groups.argsort(dim=2, stable=True).argsort(dim=2)
        kept = (rank >= self.m - self.n).float()
        return torch.where(groups.isnan(), torch.nan, kept).flatten(1, 2)

    def mask(self, units: Tensor) -> Tensor:
        """Return the mask of the entries."""
        return units


def parse_pattern(text: str | None) -> Pattern | None:
    """Return the pattern that a text such as "2:4" or "4x1" names; None if it names none.

    Args:
        text: "N:M" with N less than M, "ROWSxCOLUMNS", or None for single entries.
    """
    if text is None:
        return Entries()
    found = re.fullmatch(r"([1-9]\d{0,4})([:x])([1-9]\d{0,4})", text)
    if not found:
        return None
    one, other = int(found[1]), int(found[3])
    if found[2] == "x":
        return Blocks(one, other)
    return NOfM(one, other) if one < other else None


ENTRIES = Entries()


class PatternedWeights:
    """The weights of a model as a pattern sees them.

    Args:
        module: the whole model.
        sizes: name -> shape of each weight that is pruned.
        pattern: the pattern.

    Attributes:
        sizes: name -> shape of the units of each weight.

    Raises:
        ValueError: if the pattern does not divide a weight; names it.
    """

    def __init__(self, module: nn.Module, sizes: Mapping[str, Size], pattern: Pattern) -> None:
        self._pattern = pattern
        self._transposed: frozenset[str] = frozenset()
        self.sizes = dict(sizes)
        if not isinstance(pattern, Entries):
            owned = owners(module)
            self._transposed = frozenset(n for n in sizes if any(map(_transposed, owned[n])))
            seen = {name: self._seen_shape(name, shape) for name, shape in sizes.items()}
            _validate_divides(seen, pattern.tile)
            self.sizes = {name: pattern.units(shape) for name, shape in seen.items()}

    def scores(self, scores: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the scores of the units, each computed whenever it is read."""
        return _UnitScores(self, scores)

    def scores_of(self, name: str, scores: Tensor) -> Tensor:
        """Return the scores of one weight's units."""
        return self._pattern.scores(self._seen(name, scores))

    def masks(self, units: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks of the weights, by those of their units."""
        masks = {name: self._pattern.mask(mask) for name, mask in units.items()}
        return {name: self._seen(name, mask).contiguous() for name, mask in masks.items()}

    def _seen(self, name: str, tensor: Tensor) -> Tensor:
        """Return a weight's tensor as (outputs, inputs, ...), and such a tensor as the weight's."""
        return tensor.transpose(0, 1) if name in self._transposed else tensor

    def _seen_shape(self, name: str, shape: Size) -> Size:
        if name not in self._transposed:
            return shape
        inputs, outputs, *rest = shape
        return Size((outputs, inputs, *rest))


class _UnitScores(Mapping[str, Tensor]):
    """The scores of units by the name of the weight."""

    def __init__(self, weights: PatternedWeights, scores: Mapping[str, Tensor]) -> None:
        self._weights, self._scores = weights, scores

    def __getitem__(self, name: str) -> Tensor:
        return self._weights.scores_of(name, self._scores[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)


def _transposed(owner: Owner) -> bool:
    """Whether a layer's weight is (inputs, outputs, ...)."""
    layer, attribute = owner
    conv1d = ("transformers.pytorch_utils", "Conv1D")
    known = (type(layer).__module__, type(layer).__name__) == conv1d
    return attribute == "weight" and (known or isinstance(layer, _TRANSPOSED))


def _validate_divides(shapes: Mapping[str, Size], tile: tuple[int, int]) -> None:
    """Check that every weight consists of whole tiles."""
    wrong = {
        name: shape
        for name, shape in shapes.items()
        if len(shape) < 2 or any(size % part for size, part in zip(shape, tile, strict=False))
    }
    if wrong:
        outputs, inputs = tile
        raise ValueError(
            f"The pattern takes {outputs} outputs x {inputs} inputs together, which do not divide "
            f"these weights: {few([f'{n} {tuple(s)}' for n, s in wrong.items()])}. Choose another "
            f"pattern, or leave them dense: prune={{'{next(iter(wrong))}': False}}."
            + see("pruning")
        )
