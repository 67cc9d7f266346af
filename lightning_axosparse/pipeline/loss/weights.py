"""Weighs the losses of micro-batches, so that their gradients add up to that of the batch's loss.

A mean is weighted by its denominator. The denominators are known once the last stage has computed
all losses, but the first micro-batches are differentiated before. Their weights are provisional, by
comparison with one micro-batch: correct up to one factor, which is the same for the whole batch.
The factor is known before the last backward pass of the last stage, and is sent to the other stages
with the gradients of the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_axosparse.pipeline.loss.operators import CONSTANT, FILLED, Note, Total, Unknown


class LossWeights:
    """The weights of one batch's micro-batches, on the last stage of a pipeline.

    Args:
        sizes: samples of the micro-batches.
        may_guess: whether a loss of which nothing is known counts as a mean over samples.

    Attributes:
        problem: why the losses that were added do not make up that of the batch; empty if they do.
        is_sum: whether they are sums.
    """

    def __init__(self, sizes: Sequence[int], may_guess: bool = False) -> None:
        self._sizes, self._may_guess = sizes, may_guess
        self._counts: list[float] = []
        self._each: set[float] = set()
        """The denominators of the first mean, by sample."""
        self.problem, self.is_sum = "", False

    def add(self, note: Note) -> None:
        """Add the loss of the next micro-batch, of which this is known."""
        size = float(self._sizes[len(self._counts)])
        if isinstance(note, Unknown):
            self.fail(note.reason or "it is not a mean or a sum over samples")
        elif not (isinstance(note, Total) or note in (CONSTANT, FILLED)):
            self.fail("it is not a mean or a sum over samples")
        if not isinstance(note, Total):
            note = Total("mean", frozenset([size]))
        if not self._counts:
            self.is_sum, self._each = note.kind == "sum", {count / size for count in note.counts}
        elif self.is_sum != (note.kind == "sum"):
            self.fail("micro-batches compute it in different ways")
        if len(note.counts) > 1 and self._each != {count / size for count in note.counts}:
            self.fail("it is a sum of means over different numbers of samples or tokens")
        # Several denominators are proportional to the samples.
        self._counts.append(next(iter(note.counts)) if len(note.counts) == 1 else size)

    def fail(self, problem: str) -> None:
        """Say why the losses do not make up that of the batch."""
        self.problem = self.problem or ("" if self._may_guess else problem)

    @property
    def _reference(self) -> int | None:
        return next((n for n, count in enumerate(self._counts) if count), None)

    def weight(self, index: int) -> float:
        """The provisional weight of a micro-batch whose loss was added.

        While denominators are proportional to samples, it equals to the bit the fraction of the
        samples in the micro-batch: quotients of whole numbers are rounded once. A micro-batch
        whose denominator is zero has no weight; if all are zero, the last one is differentiated,
        which gives gradients of zero or NaN as on one process.
        """
        if self.is_sum:
            return 1.0
        total, reference = sum(self._sizes), self._reference
        if reference is None:
            return self._sizes[index] / total if index == len(self._sizes) - 1 else 0.0
        return self._counts[index] * self._sizes[reference] / (self._counts[reference] * total)

    def factor(self) -> float:
        """What the gradients of all have to be multiplied by, once the last loss was added."""
        reference = self._reference
        if reference is None or self.is_sum:
            return 1.0
        share = self._sizes[reference] * sum(self._counts)
        return self._counts[reference] * sum(self._sizes) / share

    def combined(self, values: Sequence[Tensor]) -> Tensor:
        """The value of the batch, of those that were added."""
        if self.is_sum:
            return torch.stack(list(values)).sum(0)
        pairs = zip(values, self._counts, strict=True)
        counted = [value * count for value, count in pairs if count]
        return torch.stack(counted).sum(0) / sum(self._counts) if counted else values[-1]
