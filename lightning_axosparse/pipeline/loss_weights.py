"""Weighs the losses of micro-batches, so that they add up to the loss of the batch.

The denominator of a loss is known once the last stage has computed it, so the first micro-batches
are differentiated before all denominators are known. Their weights are provisional: correct up to
one factor, which is the same for the whole batch. The factor is known before the last backward pass
of the last stage, and is sent to the other stages with the gradients of the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.process_groups import all_sum
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.reductions import Reduction, Reductions
from lightning_axosparse.pipeline.weighting import Weighting, denominators
from lightning_axosparse.support.troubleshooting import see

MicrobatchLoss = Literal["auto", "mean", "sum"]
MicrobatchWeight = str | Callable[[Any], float]

_IGNORED = -100
"""The label that losses of torch and of Hugging Face ignore by default."""

_CHOOSE = (
    "Say what is meant: AxoSparseStrategy(microbatch_loss='sum') adds the losses of micro-batches "
    "up, microbatch_loss='mean' averages them, microbatch_weight=... gives their weights, and "
    "microbatches=1 computes the loss on the whole batch."
)


_UNSEEN = (
    "It cannot be seen how the loss in `training_step` averages, so micro-batches are weighted by "
    f"their samples. {_CHOOSE}" + see("losses")
)


class LossRule(NamedTuple):
    """How a user wants the losses of micro-batches to make up that of the batch.

    Attributes:
        loss: as for :class:`LossWeights`.
        weight: as for :func:`weigh_by`; None where there is no such rule.
        check: whether the loss of the first training batch is also computed on the whole batch, for
            comparison.
    """

    loss: MicrobatchLoss = "auto"
    weight: MicrobatchWeight | None = None
    check: bool = False


class LossWeights:
    """The weights of one batch's micro-batches, on the last stage of a pipeline.

    Args:
        microbatches: the micro-batches that this pipeline computes, in order.
        samples: number of samples in the whole batch.
        loss: "mean" weighs by denominators where they are known, otherwise by samples; "sum" adds
            up; "auto" chooses between them by the reductions of the losses; "given" takes the
            weights of ``microbatches``.
        replicas: the last stages of the replicas that share the batch; None for one replica.
    """

    def __init__(
        self,
        microbatches: Sequence[MicroBatch],
        samples: int,
        loss: MicrobatchLoss | Literal["given"] = "auto",
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._microbatches, self._samples = microbatches, samples
        self._loss, self._replicas = loss, replicas
        self._weightings: list[Weighting] = []
        self._reference: tuple[float, int] | None = None
        self._total: float | None = None

    def add(self, reductions: Reductions) -> Weighting:
        """Add the reductions of the next micro-batch's loss; to be called in order.

        Returns:
            How the loss is weighted among those of the other micro-batches.
        """
        weighting = Weighting.of(reductions)
        if self._loss == "sum" or (self._loss == "auto" and weighting.kind == "sum"):
            weighting = Weighting("sum")
        elif weighting.kind not in ("mean", "empty") or self._loss == "given":
            weighting = Weighting()
        if weighting.weight and self._reference is None:
            self._reference = weighting.weight, self._microbatches[len(self._weightings)].size
        self._weightings.append(weighting)
        return weighting

    def weight(self, index: int) -> float:
        """The provisional weight of a micro-batch whose loss was added.

        While denominators are proportional to samples, it equals to the bit the fraction of the
        samples in the micro-batch: quotients of whole numbers are rounded once. A micro-batch
        whose denominator is zero has no weight; if all are zero, the last one is differentiated,
        which gives gradients of zero or NaN as on one process.
        """
        part, weighting = self._microbatches[index], self._weightings[index]
        if weighting.kind == "sum":
            return 1.0
        if weighting.kind != "mean":
            return part.weight  # The gradient of an empty sum is zero.
        if self._reference is None:
            is_last = index == len(self._microbatches) - 1
            return part.weight if is_last and not self._denominator() else 0.0
        count, size = self._reference
        return weighting.weight * size / (count * self._samples)

    def factor(self) -> float:
        """What all provisional weights have to be multiplied by; known after the last was added."""
        total = self._denominator()
        if self._reference is None:
            return 1.0
        count, size = self._reference
        return count * self._samples / (size * total)

    def _averages(self) -> bool:
        return any(weighting.kind == "mean" for weighting in self._weightings)

    def _denominator(self) -> float:
        """The denominator of the whole batch; collective when it is first asked for."""
        if self._total is None:
            sizes = [float(part.size) for part in self._microbatches]
            counts = denominators(self._weightings, sizes) if self._averages() else [0.0]
            count = torch.tensor(sum(counts), dtype=torch.float64)
            self._total = float(all_sum(count, self._replicas))
        return self._total


def weigh_by(rule: MicrobatchWeight, microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Weigh micro-batches by a user's rule.

    Args:
        rule: a function of a part of the batch that returns its weight; or the name of an entry of
            the batch: the weight is the number of integers that are not -100, or the sum of other
            values.
        microbatches: the micro-batches of a whole batch.

    Returns:
        The micro-batches with weights that add up to one; as they were, if all weigh nothing.

    Raises:
        MisconfigurationException: if the rule gives no number, or a negative one.
    """
    weights = [_weight_by(rule, part.batch) for part in microbatches]
    total = sum(weights)
    if not total:
        return list(microbatches)
    return [
        part._replace(weight=weight / total)
        for part, weight in zip(microbatches, weights, strict=True)
    ]


def _weight_by(rule: MicrobatchWeight, batch: Any) -> float:
    weight = _count(_entry(batch, rule)) if isinstance(rule, str) else rule(batch)
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise MisconfigurationException(
            f"microbatch_weight={rule!r} gave {weight!r} for a micro-batch. It has to be a finite "
            "number, at least 0: what the loss of this part of the batch was divided by."
            + see("losses")
        )
    return number


def _entry(batch: Any, name: str) -> Any:
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    if not isinstance(batch, Mapping) and hasattr(batch, name):
        return getattr(batch, name)
    there = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise MisconfigurationException(
        f"microbatch_weight={name!r} names no entry of the batch ({there}). Name one, or give a "
        "function of a part of the batch." + see("losses")
    )


def _count(entry: Any) -> float:
    values = torch.as_tensor(entry)
    if values.dtype is torch.bool or values.is_floating_point():
        return float(values.double().sum())
    return float((values != _IGNORED).sum())


def validate_losses(losses: Sequence[Reductions], sizes: Sequence[int]) -> str | None:
    """Check that the losses of a batch's micro-batches combine to what one process computes.

    Args:
        losses: the reductions of each micro-batch's loss; at least two.
        sizes: samples in each micro-batch.

    Returns:
        A warning, if they combine approximately; otherwise None.

    Raises:
        MisconfigurationException: if they do not combine to it.
    """
    if all(len(loss) == 1 and _is_plain(loss[0]) for loss in losses):
        return None
    if any(reduction.among_samples for loss in losses for reduction in loss):
        raise MisconfigurationException(
            "The loss is a cross entropy among the samples of the batch (its classes are their "
            "numbers, as in contrastive losses). In a pipeline it would compare the samples of a "
            "micro-batch alone. Use AxoSparseStrategy(microbatches=1), or accept it with "
            "microbatch_loss='mean'." + see("losses")
        )
    has_constants = any(reduction.kind == "constant" for loss in losses for reduction in loss)
    losses = [tuple(r for r in loss if r.kind != "constant") for loss in losses]
    known = [loss for loss in losses if loss]
    columns = [
        [reduction for reduction in column if not reduction.is_empty]
        for column in zip(*known, strict=False)
    ]
    varying = [column for column in columns if _varies(column)]
    averages = any(reduction.kind == "mean" for loss in losses for reduction in loss)
    adds_up = any(reduction.kind == "sum" for column in varying for reduction in column)
    if averages and adds_up:
        raise MisconfigurationException(
            "The loss adds means over samples to sums over samples, which no weight of the "
            f"micro-batches combines to the loss of the batch. {_CHOOSE}" + see("losses")
        )
    if has_constants and adds_up:
        raise MisconfigurationException(
            "The loss adds a term of parameters alone, such as a penalty on weights, to sums over "
            "samples: added up over micro-batches, the term would count once for each of them. "
            "Divide the loss by the number of samples, put the penalty into the optimizer "
            "(`weight_decay`), or use AxoSparseStrategy(microbatches=1)." + see("losses")
        )
    divisors = [{r.divisor for r in column if r.kind == "sum"} for column in varying]
    if any(len(found) > 1 for found in divisors):
        raise MisconfigurationException(
            "The loss divides a sum over samples by a number that differs between micro-batches "
            f"and was not counted by torch. {_CHOOSE}" + see("losses")
        )
    if len(known) < len(losses) and not _by_samples(losses, sizes):
        return _UNSEEN
    return _inexact(columns, varying)


def _by_samples(losses: Sequence[Reductions], sizes: Sequence[int]) -> bool:
    """Whether there are denominators, and all are proportional to samples."""
    counts = [
        (loss[0].count, size)
        for loss, size in zip(losses, sizes, strict=True)
        if loss and loss[0].kind == "mean"
    ]
    return bool(counts) and all(
        count * counts[0][1] == size * counts[0][0] for count, size in counts
    )


def _inexact(
    columns: Sequence[Sequence[Reduction]], varying: Sequence[Sequence[Reduction]]
) -> str | None:
    if any(reduction.kind == "statistic" for column in varying for reduction in column):
        return (
            "A part of the loss is a statistic of the samples together (such as a variance, a "
            "maximum, a product of means, or similarities between samples), so the "
            "micro-batches' losses do not combine to exactly that of the batch. "
            "AxoSparseStrategy(microbatches=1) is exact; microbatch_loss='mean' accepts it."
        )
    means = [column for column in columns if {r.kind for r in column} == {"mean"}]
    if any(not _proportional(means[0], column) for column in means[1:]):
        return (
            "The loss adds means with different denominators (such as tokens and samples), and "
            "the micro-batches are weighted by the first of them. "
            "AxoSparseStrategy(microbatch_weight=...) chooses another; microbatches=1 is exact."
        )
    return None


def _is_plain(reduction: Reduction) -> bool:
    return reduction.kind == "mean" and not reduction.among_samples


def _varies(column: Sequence[Reduction]) -> bool:
    """Whether the values of micro-batches differ; terms of parameters alone do not."""
    values = [None if reduction.value is None else float(reduction.value) for reduction in column]
    return None in values or len(set(values)) > 1


def _proportional(one: Sequence[Reduction], other: Sequence[Reduction]) -> bool:
    return all(
        a.count * other[0].count == b.count * one[0].count for a, b in zip(one, other, strict=True)
    )
