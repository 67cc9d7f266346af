"""Memory: bytes of model state, by how weights are stored.

What lives only for a moment is not counted: the dense matrix of one operator, 16-bit copies of
weights under autocast, buffers of messages and of the all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass


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


DENSE = Storage(per_weight=0, per_kept=16, gradient=4)
"""float32 weight, gradient and two moments of Adam."""

SPARSE = Storage(per_weight=0, per_kept=20, gradient=4)
"""The same for a kept weight, and its int32 index; nothing for a pruned one."""
