"""Differentiates the loss of each micro-batch as soon as it is computed ("by parts").

A stage then holds few micro-batches at a time. The user declares that this is right: the loss of
the batch is a sum, or a mean, of those of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.distributed.token_exchange import exchange_nothing
from lightning_axosparse.pipeline.crossing.message import (
    EMPTY,
    Activation,
    Gradients,
    Message,
    detached_message,
)
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.pipeline.generators import Generators
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.pipeline.stage_step import TrainingStageStep, loss_of
from lightning_axosparse.pipeline.step_end import StepEnd
from lightning_axosparse.support.troubleshooting import see

Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Any], float]
"""How the loss of a batch follows from its samples.

A function returns, for a micro-batch, the number by which its mean divides, such as its tokens.
"""


class LossWeights:
    """The weights with which the losses of micro-batches add up to that of the batch.

    A mean is weighted by its denominator: for micro-batches of 3 and 5 samples by 3/8 and 5/8.

    Args:
        reduction: how the loss follows from the samples.
        microbatches: the micro-batches of the batch.

    Attributes:
        of: the weight of each micro-batch.

    Raises:
        MisconfigurationException: if the user's function returns no number of at least 0.
    """

    def __init__(self, reduction: Reduction, microbatches: Sequence[MicroBatch]) -> None:
        if callable(reduction):
            counts = [_denominator(reduction, part) for part in microbatches]
        else:
            counts = [1.0 if reduction == "sum" else float(part.size) for part in microbatches]
        total = 1.0 if reduction == "sum" else sum(counts)
        if not total:  # It is all padding: as on one process, gradients are zero, or NaN.
            counts[-1] = total = 1.0
        self.of = [count / total for count in counts]

    def combined(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the loss of the batch; those of weight 0 may be NaN."""
        pairs = zip(losses, self.of, strict=True)
        return torch.stack([loss * weight for loss, weight in pairs if weight]).sum(0)


def _denominator(count_of: Callable[[Any], float], part: MicroBatch) -> float:
    """Return the number by which the mean of a micro-batch divides, by the user's function."""
    count = count_of(part.batch)
    try:
        number = float(count)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise MisconfigurationException(
            f"The function of AxoSparseStrategy(loss=...) returned {count!r} for a micro-batch. Let"
            " it return the number by which the mean divides, such as that of the labels that are "
            "not ignored." + see("losses")
        )
    return number


def not_by_parts(problem: str) -> MisconfigurationException:
    """Return the error of a step that does something else on micro-batches than on the batch."""
    return MisconfigurationException(
        f"{problem}, so the loss does not follow from micro-batches, as AxoSparseStrategy(loss=...)"
        " says. Use loss='whole', which is right for every step." + see("losses")
    )


class PartedStageStep(TrainingStageStep):
    """The last stage, where losses are differentiated by parts.

    Args:
        shared: as for :class:`TrainingStageStep`.
        reduction: how the loss of the batch follows from its samples.
        keeps: whether to keep the layer outputs, for a run of the end of the step on the batch.
        more: as for :class:`TrainingStageStep`.
    """

    def __init__(self, *shared: Any, reduction: Reduction, keeps: bool, **more: Any) -> None:
        super().__init__(*shared, **more)
        self._keeps = keeps
        self._weights = LossWeights(reduction, self.batch.microbatches)
        self._losses: list[Tensor] = []
        self._drawn: list[Generators] = []
        """The states of the generators after each micro-batch, if the step draws."""
        self.returns_mapping = False
        """Whether the step returns a dict with the loss."""

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        """Run the user's step on a micro-batch, to its end."""
        failed = super().forward(microbatch, received).failed
        if failed is not None:
            self._losses.append(Tensor())
            self.rerun = failed
        return EMPTY

    def _new_run(self, microbatch: int, received: Message) -> StepRun:
        run = super()._new_run(microbatch, received)
        run = replace(run, sent=run.sent if self._keeps else None, ends_behind_layers=False)
        if not self.batch.numbers:  # Python's and NumPy's generators stay, so draws show.
            run.seed_layers = partial(self.batch.rng.seed_torch, microbatch, self.stage)
            run.draws = self.batch.rng.noticed_draws()
        return run

    def _passed(self, run: StepRun, microbatch: int) -> Activation:
        """Run the step to its end; return the layer outputs, if they are kept."""
        self._runs[microbatch] = run
        measured = self._limit.measured(self.stage, run.received.tensors)
        with self.batch.effects.of_part(), measured:
            output = self._run_step(run, self.batch.microbatches[microbatch])
        self._losses.append(loss_of(output))
        if self._keeps and self.batch.numbers:
            self._drawn.append(self.batch.rng.present())
        self.returns_mapping = isinstance(output, Mapping)
        self.rerun = self.rerun or self._why_again(run, output)
        return EMPTY if run.sent_here is None else detached_message(run.sent_here)[1].content

    def _why_again(self, run: StepRun, output: Any) -> Rerun | None:
        """Return why the batch has to run again, after a run on a micro-batch."""
        if run.draws is not None and run.draws.has_drawn():
            return Rerun.DRAWS
        if run.numbers:  # Only the end of the step compares them.
            return Rerun.READS
        numbers = self.batch.numbers.get(self.stage)
        if numbers is not None and numbers.problem:
            raise not_by_parts(numbers.problem)
        if self._keeps:
            return None
        has_drawn = numbers is not None and (numbers.has_drawn_own or self.batch.rng.has_drawn())
        if has_drawn or not self.batch.effects.only_logs_loss(output, self._losses[-1]):
            return Rerun.HAS_OTHER_EFFECTS
        return None

    def _own_gradients(self, microbatch: int) -> Gradients:
        return Gradients((), self.rerun)

    def _differentiate(self, microbatch: int, sent: Sequence[Tensor], gradients: Gradients) -> None:
        loss, weight = self._losses[microbatch], self._weights.of[microbatch]
        if weight and self.rerun is None:
            self._backward.differentiate(loss * weight)
        else:  # It is all padding, for example: its loss may be NaN.
            exchange_nothing([loss])
        self._losses[microbatch] = loss.detach()

    def run_on_batch(self) -> Any:
        """Run the end of the step on the batch, after the micro-batches; return the output.

        Raises:
            MisconfigurationException: if it does something else there.
        """
        try:  # With a graph, as the step may run a backward pass of its own.
            output = (end := StepEnd(self.batch)).run(self.activations)
            end.validated()
        except RunAgain as error:  # Gradients have been added, so it is too late for that.
            raise not_by_parts(f"On the batch, unlike on its parts, {error}") from None
        if not all(states.match_python_and_numpy() for states in self._drawn):
            raise not_by_parts("The step draws a number for each sample from NumPy or Python")
        return output

    @property
    def loss(self) -> Tensor:
        """The loss of the batch."""
        return self._weights.combined(self._losses)
