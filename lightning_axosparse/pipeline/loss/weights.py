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

from lightning_axosparse.pipeline.loss.separable import CONSTANT, FILLED, Note, Total


class LossWeights:
    """The weights of one batch's micro-batches, on the last stage of a pipeline.

    Args:
        sizes: samples of the micro-batches.
        may_guess: whether a loss of which nothing is known counts as a mean over samples.

    Attributes:
        problem: why the losses that were added do not make up that of the batch; empty if they do.
    """

    def __init__(self, sizes: Sequence[int], may_guess: bool = False) -> None:
        self._sizes, self._may_guess = sizes, may_guess
        self._notes: list[Total] = []
        self._counts: list[float] = []
        self._total = 0.0
        self.problem = ""

    def add(self, loss: Tensor, note: Note, reason: str) -> None:
        """Add the loss of the next micro-batch.

        Args:
            loss: its loss.
            note: what it is.
            reason: why that is not known, where it is not.
        """
        size = float(self._sizes[len(self._notes)])
        if not isinstance(note, Total) and (self._may_guess or note in (CONSTANT, FILLED)):
            note = Total("mean", frozenset([size]))
        if not isinstance(note, Total):
            self._fail(reason or "it is not a mean or a sum over samples")
        elif note.kind == "sum" and note.has_constant:
            self._fail("it is a sum over samples and something else")
        elif self._notes and (note.kind != self._notes[0].kind):
            self._fail("micro-batches compute it in different ways")
        if self.problem:
            note = Total("mean", frozenset([size]))
        assert isinstance(note, Total)
        self._notes.append(note)
        self._counts.append(self._count(note, size))
        self._total += self._counts[-1] if note.divisor is None else note.divisor

    @property
    def _denominator(self) -> float:
        """That of the batch, which like those of micro-batches is no less than a minimum."""
        pairs = zip(self._counts, self._notes, strict=True)
        least = [count for count, note in pairs if note.divisor not in (None, count)]
        return max([self._total, *least])

    def _count(self, note: Total, size: float) -> float:
        """The denominator of a mean: the samples, where several are proportional to them."""
        if len(note.counts) == 1:
            return next(iter(note.counts))
        own = {count / size for count in note.counts}
        if own != {count / self._sizes[0] for count in self._notes[0].counts}:
            self._fail("it is a sum of means over different numbers of samples or tokens")
        return size

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem

    @property
    def is_sum(self) -> bool:
        """Whether the losses that were added are sums."""
        return bool(self._notes) and self._notes[0].kind == "sum"

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
        own = self._counts[index]
        if not own:
            return 0.0
        return own * self._sizes[reference] / (self._counts[reference] * total)

    def factor(self) -> float:
        """What the gradients of all have to be multiplied by, once the last loss was added."""
        reference = self._reference
        if reference is None or self.is_sum:
            return 1.0
        share = self._sizes[reference] * self._denominator
        return self._counts[reference] * sum(self._sizes) / share

    def combined(self, values: Sequence[Tensor]) -> Tensor:
        """The value of the batch, of those that were added."""
        if self.is_sum:
            return torch.stack(list(values)).sum(0)
        counted = [
            value * count for value, count in zip(values, self._counts, strict=True) if count
        ]
        return torch.stack(counted).sum(0) / self._denominator if counted else values[-1]
