"""Predicts the bytes of model state and of the all-reduce, by how weights are stored.

With the fraction f of the weights kept and an index of i bytes per kept weight, a weight takes

| policy | float32 | bf16-mixed, 16-mixed | bf16-true |
| --- | --: | --: | --: |
| dense, Adam | 16 | 16 | 8 |
| sparse | (16 + i) f | (16 + i) f | (16 + i) f |
| samo | (16 + i) f + 4 | (16 + i) f + 2 | (16 + i) f + 2 |

where 16 is a float32 master value, its gradient and the two moments of Adam. SAMO's own figure is
24 f + 2 against 20 (Singh & Bhatele, IPDPS 2023): i = 4, a 16-bit gradient beside the float32 one
(2 f), and a 16-bit copy of the kept values while weights are made dense (2 f); here are neither.

Temporary memory is not counted: the dense matrix of one operator, 16-bit copies of weights under
autocast, buffers of messages and of the all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_BLOCK_ENTRIES, _SEGMENT_ENTRIES = 4096, 256
"""Entries of a block and of a segment, for which a layout stores 4 and 2 bytes."""


@dataclass(frozen=True)
class Storage:
    """Bytes of one weight's state: the weight, its gradient, optimizer state and index.

    Attributes:
        per_weight: bytes per weight, pruned or not.
        per_kept: further bytes per kept weight.
        gradient: bytes of a kept weight's gradient in the data-parallel all-reduce.
        optimizer: bytes of a kept weight's optimizer state, which are among ``per_kept``.
        fixed: bytes per device, independent of the number of weights.
    """

    per_weight: float
    per_kept: float
    gradient: float
    optimizer: float = 0.0
    fixed: float = 0.0

    def divided(self, replicas: int) -> Storage:
        """What a replica stores if that many replicas divide the optimizer's state (ZeRO 1)."""
        share = self.optimizer / replicas
        return replace(self, per_kept=self.per_kept - self.optimizer + share, optimizer=share)

    def state_bytes(self, weights: float, pruning_ratio: float) -> float:
        """Return the bytes of state of ``weights`` weights, ``pruning_ratio`` of them pruned."""
        return weights * (self.per_weight + (1 - pruning_ratio) * self.per_kept) + self.fixed

    def reduced_bytes(self, weights: float, pruning_ratio: float) -> float:
        """Return the bytes that the data-parallel all-reduce sends for ``weights`` weights."""
        return weights * (1 - pruning_ratio) * self.gradient


DENSE = Storage(per_weight=0, per_kept=16, gradient=4, optimizer=8)
"""Float32 weights with their gradients and the two moments of Adam."""

SPARSE = Storage(
    per_weight=4 / _BLOCK_ENTRIES + 2 / _SEGMENT_ENTRIES, per_kept=16 + 1, gradient=4, optimizer=8
)
"""Policy "sparse" in the index format "segments": one byte of index per kept weight, two per
segment."""
