"""The weights with which the gradients of micro-batch losses add up to that of the batch's loss.

A mean is weighted by its denominator. All denominators are known only after the last loss has been
computed, but the first losses are differentiated before. So provisional weights compare each
micro-batch with the first one, and are correct up to a factor that is common to the batch. It is
known before the last backward pass of the last stage, which sends it to the other stages with the
gradients of the last micro-batch. Two micro-batches of 2 samples, whose means are over 3 and 5
tokens, have:

    weights of the batch's mean     3/8 and 5/8
    provisional weights             1/2 and 1/2 * 5/3 = 5/6
    factor                          3/4
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_axosparse.pipeline.loss.operators import CONSTANT, FILLED, Note, Total, Unknown


class LossWeights:
    """The weights of the losses of one batch's micro-batches, on the last stage of a pipeline.

    Args:
        sizes: number of samples in each micro-batch.
        may_guess: whether a loss of unknown form is taken for a mean over samples.

    Attributes:
        problem: why the loss of the batch does not follow from those added; empty if it does.
        is_sum: whether the losses are sums rather than means.
    """

    def __init__(self, sizes: Sequence[int], may_guess: bool = False) -> None:
        self._sizes, self._may_guess = sizes, may_guess
        self._denominators: list[float] = []
        self._reference: int | None = None
        """The index of the first micro-batch whose denominator is not zero."""
        self._per_sample: set[float] = set()
        """The denominators of the first micro-batch, divided by its samples."""
        self.problem, self.is_sum = "", False

    def add(self, note: Note) -> None:
        """Add the note of the next micro-batch's loss."""
        size = float(self._sizes[len(self._denominators)])
        if isinstance(note, Unknown):
            self.fail(note.reason or "it is not a mean or a sum over samples")
        elif not (isinstance(note, Total) or note in (CONSTANT, FILLED)):
            self.fail("it is not a mean or a sum over samples")
        if not isinstance(note, Total):
            note = Total("mean", frozenset([size]))
        denominators = note.denominators
        per_sample = {denominator / size for denominator in denominators}
        if not self._denominators:
            self.is_sum, self._per_sample = note.kind == "sum", per_sample
        elif self.is_sum != (note.kind == "sum"):
            self.fail("micro-batches compute it in different ways")
        if len(denominators) > 1 and self._per_sample != per_sample:
            self.fail("it is a sum of means over different numbers of samples or tokens")
        # Several denominators are proportional to the samples.
        denominator = next(iter(denominators)) if len(denominators) == 1 else size
        if self._reference is None and denominator:
            self._reference = len(self._denominators)
        self._denominators.append(denominator)

    def fail(self, problem: str) -> None:
        """Record why the loss of the batch does not follow from those of micro-batches."""
        self.problem = self.problem or ("" if self._may_guess else problem)

    def weight(self, index: int) -> float:
        """Return the provisional weight of a micro-batch whose loss was added.

        While denominators are proportional to samples, it is exactly the micro-batch's fraction of
        the samples, as quotients of whole numbers are rounded once. A micro-batch whose denominator
        is zero has weight zero; if all are zero, the last one is differentiated, whose gradients
        are zero or NaN as on one process.
        """
        if self.is_sum:
            return 1.0
        denominators, reference, total = self._denominators, self._reference, sum(self._sizes)
        if reference is None:
            return self._sizes[index] / total if index == len(self._sizes) - 1 else 0.0
        return denominators[index] * self._sizes[reference] / (denominators[reference] * total)

    def factor(self) -> float:
        """Return the factor for all gradients of the batch, once the last loss was added."""
        reference = self._reference
        if reference is None or self.is_sum:
            return 1.0
        share = self._sizes[reference] * sum(self._denominators)
        return self._denominators[reference] * sum(self._sizes) / share

    def combined(self, values: Sequence[Tensor]) -> Tensor:
        """Return the value of the whole batch; ``values`` are those of its micro-batches."""
        if self.is_sum:
            return torch.stack(list(values)).sum(0)
        pairs = zip(values, self._denominators, strict=True)
        counted = [value * count for value, count in pairs if count]
        return torch.stack(counted).sum(0) / sum(self._denominators) if counted else values[-1]
