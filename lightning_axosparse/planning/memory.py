"""Memory: bytes of model state, by how weights are stored.

With the share f of the weights kept and an index of i bytes a kept weight, a weight takes

| policy | float32 | bf16-mixed, 16-mixed | bf16-true |
| --- | --: | --: | --: |
| dense, Adam | 16 | 16 | 8 |
| sparse | (16 + i) f | (16 + i) f | (16 + i) f |
| samo | (16 + i) f + 4 | (16 + i) f + 2 | (16 + i) f + 2 |

where 16 is a float32 master value, its gradient and the two moments of Adam. SAMO's own figure is
24 f + 2 against 20 (Singh & Bhatele, IPDPS 2023): i = 4, a 16-bit gradient beside the float32 one
(2 f), and a 16-bit copy of the kept values while weights are made dense (2 f); here are neither.

What lives only for a moment is not counted: the dense matrix of one operator, 16-bit copies of
weights under autocast, buffers of messages and of the all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Storage:
    """What the state of one weight takes: the weight, its gradient, optimizer state and index.

    Attributes:
        per_weight: bytes for every weight, pruned or not.
        per_kept: further bytes for a weight that is kept.
        gradient: bytes of a kept weight's gradient in the data-parallel all-reduce.
        fixed: bytes a device needs whatever it holds.
    """

    per_weight: float
    per_kept: float
    gradient: float
    fixed: float = 0.0

    def state_bytes(self, weights: float, pruning_ratio: float) -> float:
        """Bytes of the state of ``weights`` weights of which ``pruning_ratio`` are pruned."""
        return weights * (self.per_weight + (1 - pruning_ratio) * self.per_kept) + self.fixed

    def reduced_bytes(self, weights: float, pruning_ratio: float) -> float:
        """Bytes that the data-parallel all-reduce carries for ``weights`` weights."""
        return weights * (1 - pruning_ratio) * self.gradient


WEIGHT_BYTES = {"32-true": 4, "bf16-mixed": 4, "16-mixed": 4, "bf16-true": 2, "16-true": 2}
"""Bytes of a dense weight, by Lightning's name of the precision."""

_BLOCK = 4096  # entries of which an index format counts the kept ones

INDEX_BYTES = {
    "coo": (4 / _BLOCK, 4),
    "block": (4 / _BLOCK, 2),
    "gaps": (12 / _BLOCK, 1),
    "bitmap": (4 / _BLOCK + 1 / 8, 0),
}
"""Index format -> bytes of index for every weight, and further bytes for one that is kept.

Gaps of 256 and more take 12 bytes, which counts where more than 98 % are pruned.
"""


def dense(precision: str = "32-true") -> Storage:
    """The state of weights that are not pruned: weight, gradient and two moments, of one dtype.

    Args:
        precision: Lightning's name of it.

    Raises:
        ValueError: for another precision.
    """
    weight = _of(WEIGHT_BYTES, precision)
    return Storage(per_weight=0, per_kept=4 * weight, gradient=weight)


def sparse(index_format: str = "gaps") -> Storage:
    """The state with the policy "sparse", in every precision: float32 for what is kept.

    Args:
        index_format: "coo", "block", "gaps" or "bitmap".

    Raises:
        ValueError: for another format.
    """
    per_weight, per_kept = _of(INDEX_BYTES, index_format)
    return Storage(per_weight, 16 + per_kept, gradient=4)


def samo(precision: str = "bf16-mixed", index_format: str = "gaps") -> Storage:
    """The state with the policy "samo": besides, a dense copy in the dtype that products run in.

    Args:
        precision: Lightning's name of it.
        index_format: as for :func:`sparse`.

    Raises:
        ValueError: for another precision or format.
    """
    _of(WEIGHT_BYTES, precision)
    stored = sparse(index_format)
    return replace(stored, per_weight=stored.per_weight + (4 if precision == "32-true" else 2))


def _of(known: dict[str, T], name: str) -> T:
    if name not in known:
        raise ValueError(f"'{name}' is not known here. Take one of {list(known)}.")
    return known[name]


DENSE = dense()
"""float32 weight, gradient and two moments of Adam."""

SPARSE = sparse()
"""The same for a kept weight, and its index, of which a pruned one takes next to nothing."""
