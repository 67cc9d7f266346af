"""Trains and evaluates batches on the stages of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_axosparse.pipeline.batch import Batch
from lightning_axosparse.pipeline.choice import InFlightLimit
from lightning_axosparse.pipeline.crossing.message import Link, Place, StageReads, detached_message
from lightning_axosparse.pipeline.engine import SharedOrder, StageRun, run
from lightning_axosparse.pipeline.rerun import Rerun
from lightning_axosparse.pipeline.schedule import ForwardOnly, Schedule
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.pipeline.stage_step import (
    ProbingStep,
    StageStep,
    TrainingStageStep,
)
from lightning_axosparse.pipeline.step_end import (
    EndedStageStep,
    StepEnd,
    WholeStageStep,
    run_undivided,
)
from lightning_axosparse.pipeline.step_front import StepFront
from lightning_axosparse.support.object_trees import object_leaves
from lightning_axosparse.support.trace import clock

S = TypeVar("S", bound=StageStep)


class Pipeline:
    """The stages of this process.

    Args:
        layers: the layers of all stages.
        links: for each stage of this process, its link to adjacent stages.
        schedule: schedule of training.
        limit: the in-flight limit.
        gather: returns the values of all ranks of the pipeline.
        order: the order of passes, if other ranks share layers with this one.
        outer_parameters: returns the parameters outside the layers.
    """

    def __init__(
        self,
        layers: PipelinedLayers,
        links: Mapping[int, Link],
        schedule: type[Schedule],
        limit: InFlightLimit,
        gather: Callable[[Any], list[Any]],
        order: SharedOrder | None = None,
        outer_parameters: Callable[[], Collection[nn.Parameter]] = list,
    ) -> None:
        self._shared_order = order
        self.limit, self._schedule = limit, schedule
        self.peak_in_flight: dict[int, int] = {}
        """Largest number of micro-batches that each stage held in the last training batch."""
        self._layers, self._links = layers, links
        self._gather, self._outer_parameters = gather, outer_parameters
        self._stages = len(layers.parts)

    @property
    def is_divided(self) -> bool:
        """Whether there are several stages."""
        return self._stages > 1

    def train(
        self, batch: Batch, by_parts: Callable[..., TrainingStageStep] | None = None
    ) -> tuple[TrainingStageStep | None, Rerun | None]:
        """Run a training step forward and backward.

        Args:
            batch: the batch.
            by_parts: makes the step of the last stage that differentiates by parts; None to
                differentiate the loss of the whole batch.

        Returns:
            The last stage's step; None on other ranks. And why the gradients are dropped and the
            batch has to run again; None if it has not.
        """
        self.limit.begin_batch(held=len(batch.microbatches) if by_parts is None else 0)
        first, last = min(self._links), self._stages - 1
        of_last = by_parts or (EndedStageStep if self.is_divided else WholeStageStep)

        def make(stage: int, *shared: Any) -> TrainingStageStep:
            kind = of_last if stage == last else TrainingStageStep
            return kind(stage, *shared, limit=self.limit, is_first_here=stage == first)

        front, forwards_first = self._front(batch), by_parts is None
        steps, runs = self._prepared(batch, make, self._schedule, front, forwards_first)
        run(runs)
        self.peak_in_flight = {each.stage: each.peak_in_flight for each in runs}
        return steps.get(last), steps[first].rerun

    def evaluate(self, batch: Batch) -> Any:
        """Run a step forward only.

        Returns:
            The output of the step on the last stage; None on other ranks.

        Raises:
            RunAgain: on the last stage, if the batch has to run again.
        """
        if not self.is_divided:
            return run_undivided(batch)
        last = self._stages - 1
        steps = self.forward(batch, StageStep)
        if last not in steps:
            return None
        with clock.span("forward", last):
            return StepEnd(batch).run(steps[last].activations)

    def forward(self, batch: Batch, make: Callable[..., S]) -> dict[int, S]:
        """Run the forward passes of micro-batches.

        Args:
            batch: the batch.
            make: makes the step of a stage.

        Returns:
            The steps of the stages of this process.
        """
        front = self._front(batch)
        steps, runs = self._prepared(batch, make, ForwardOnly, front)
        run(runs)
        return steps

    def probe(self, batch: Batch) -> dict[int, StageReads]:
        """Run the first micro-batch forward, and return the values that each stage reads of others.

        Collective over the pipeline. Gradients are not computed, but the graph is, as the behaviour
        of a step may depend on it.
        """
        batch = replace(batch, microbatches=batch.microbatches[:1], crossing=None)
        steps, runs = self._prepared(batch, ProbingStep, ForwardOnly)
        run(runs)
        reads = {stage: step.reads for stage, step in steps.items()}
        if self._stages - 1 in steps:
            reads[self._stages] = self._read_by_end(batch, steps[self._stages - 1])
        gathered = self._gather(reads)
        return {stage: each for others in gathered for stage, each in others.items()}

    def _read_by_end(self, batch: Batch, last: ProbingStep) -> StageReads:
        """Return the values of the stages that the end of the step reads."""
        reads, (activation,) = StageReads(), last.activations
        if activation.failed is not None or activation.is_empty:
            return reads
        message = detached_message(activation)[1]
        try:
            with batch.effects.read():
                StepEnd(batch).rehearse(batch.microbatches[0], message, reads=reads)
        except Exception:  # The step raises it again when it runs.
            return reads
        # Always, as ``vmap`` and functions of autograd read tensors without a torch function.
        last_layer, outputs = len(self._layers.layers) - 1, object_leaves(activation.output, Tensor)
        reads.read |= {Place(last_layer, 0, leaf) for leaf in range(len(outputs))}
        reads.is_complete = True
        return reads

    def _front(self, batch: Batch) -> StepFront | None:
        """Run the code before the layers on the batch; return None if no stage here needs that."""
        first, is_whole = min(self._links), len(batch.microbatches) == 1
        if not self.is_divided or is_whole or (first > 0 and not batch.mixes):
            return None
        front = StepFront(batch, first, () if batch.backward is None else self._outer_parameters())
        front.run()
        return front

    def _prepared(
        self,
        batch: Batch,
        make: Callable[..., S],
        schedule: type[Schedule],
        front: StepFront | None = None,
        forwards_first: bool = False,
    ) -> tuple[dict[int, S], list[StageRun]]:
        """Create the steps of a batch on the stages of this process, and their runs."""
        steps = {stage: make(stage, batch, front) for stage in self._links}
        shared = self._stages, len(batch.microbatches), self.limit.value, forwards_first
        runs = [
            StageRun(schedule(stage, *shared), self._links[stage], step, self._shared_order)
            for stage, step in steps.items()
        ]
        return steps, runs
