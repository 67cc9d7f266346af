"""Combines the values of micro-batches to the value of the batch, weighted by denominators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_axosparse.pipeline.reductions import Reductions


class Weighting(NamedTuple):
    """How one micro-batch's value is weighted in that of the whole batch; can be pickled.

    Attributes:
        kind: "mean" by ``weight``; "sum"; "empty" for a sum of nothing; "constant" where it was
            computed from parameters and buffers alone; "statistic" where no weight makes it exact;
            "unknown" where no reduction was seen. The last three combine as means over samples.
        weight: the denominator of a mean; what an empty sum was divided by, if that may have been
            its number of samples.
        divided_by_samples: whether the denominator of a mean was that number.
    """

    kind: Literal["mean", "sum", "empty", "constant", "statistic", "unknown"] = "unknown"
    weight: float = 0.0
    divided_by_samples: bool = False

    @classmethod
    def of(cls, reductions: Reductions) -> Weighting:
        """The weighting of a value that came from these reductions."""
        if not reductions:
            return cls()
        constants = [reduction for reduction in reductions if reduction.kind == "constant"]
        reductions = tuple(r for r in reductions if r.kind != "constant")
        means = [reduction for reduction in reductions if reduction.kind == "mean"]
        if means:
            return cls("mean", means[0].count, means[0].divisor == means[0].count)
        if not reductions:
            return cls("constant")
        if all(reduction.is_empty for reduction in reductions):
            divisor = reductions[0].divisor
            counts = reductions[0].mean_divisors.counts
            return cls("empty", divisor if divisor and divisor in counts else 0.0)
        # A constant added to sums would count once for every micro-batch.
        adds_up = not constants and all(reduction.kind == "sum" for reduction in reductions)
        return cls("sum" if adds_up else "statistic")


def combine(
    values: Sequence[Tensor], weightings: Sequence[Weighting], samples: Sequence[float]
) -> Tensor:
    """The value of a batch from those of its micro-batches.

    Args:
        values: tensors of one shape, one for each micro-batch.
        weightings: how each is weighted.
        samples: weight of each micro-batch by its samples, where no denominator is known.

    Returns:
        The sum, or the weighted mean; NaN, as on one process, where nothing at all was averaged.
    """
    if all(weighting.kind in ("sum", "empty") for weighting in weightings):
        return torch.stack(list(values)).sum(0)
    weights = mean_weights(weightings, samples)
    # A mean over nothing is NaN, with weight zero.
    terms = [v * w for v, w in zip(values, weights, strict=True) if w] or list(values)
    return torch.stack(terms).sum(0)


def mean_weights(weightings: Sequence[Weighting], samples: Sequence[float]) -> Sequence[float]:
    """The weight of each micro-batch's value in a mean; arguments as for :func:`combine`."""
    if not any(weighting.kind == "mean" for weighting in weightings):
        return samples
    counts = denominators(weightings, samples)
    return [count / (sum(counts) or 1) for count in counts]


def denominators(weightings: Sequence[Weighting], samples: Sequence[float]) -> list[float]:
    """The denominator of each value, where some are means; arguments as for :func:`combine`.

    An empty sum that was divided by one was divided by ``max(1, count)``, or, if all means were
    divided by their numbers of samples, by its own number. Where the denominator of a value is
    unknown, it has as many entries per sample as the first mean.
    """
    means = [(w, size) for w, size in zip(weightings, samples, strict=True) if w.kind == "mean"]
    by_samples = all(weighting.divided_by_samples for weighting, _ in means)
    per_sample = next((w.weight / size for w, size in means if w.weight), 1.0)

    def denominator(weighting: Weighting, size: float) -> float:
        if weighting.kind == "mean" or (weighting.kind == "empty" and by_samples):
            return weighting.weight
        return 0.0 if weighting.kind == "empty" else size * per_sample

    return [denominator(w, size) for w, size in zip(weightings, samples, strict=True)]
