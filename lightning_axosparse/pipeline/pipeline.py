"""Pipeline: takes a user's step through all micro-batches of a batch on this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_axosparse.pipeline import engine
from lightning_axosparse.pipeline.batch_identity import BatchIdentity
from lightning_axosparse.pipeline.engine import StageEngine
from lightning_axosparse.pipeline.limit import Limit
from lightning_axosparse.pipeline.link import Link
from lightning_axosparse.pipeline.loss_weights import LossWeights
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.randomness import Randomness
from lightning_axosparse.pipeline.reductions import ReductionTracker
from lightning_axosparse.pipeline.schedule import ForwardOnly, Schedule
from lightning_axosparse.pipeline.stage import PipelinedLayers
from lightning_axosparse.pipeline.step import StageStep, TrainingStageStep

Step = Callable[[Any], Any]
Observe = Callable[[MicroBatch], AbstractContextManager[None]]


class Pipeline:
    """The stages of this rank.

    Args:
        layers: the dealt layers.
        links: the link of each stage on this rank: of one, or of all where the whole pipeline lives
            in one process.
        schedule: class of the training schedule.
        limit: most micro-batches that a stage may hold.
        randomness: random numbers of the pipeline.
        tracker: follows the reductions in steps of the last stage.
    """

    def __init__(
        self,
        layers: PipelinedLayers,
        links: Mapping[int, Link],
        schedule: type[Schedule],
        limit: Limit,
        randomness: Randomness,
        tracker: ReductionTracker,
    ) -> None:
        self.peak_in_flight: dict[int, int] = {}
        """Most micro-batches that each stage of this rank held in its last training batch."""
        self._layers, self._links, self._randomness = layers, links, randomness
        self._tracker = tracker
        self._schedule, self.limit = schedule, limit
        self._last = len(layers.parts) - 1

    def train(
        self,
        step: Step,
        microbatches: Sequence[MicroBatch],
        observe: Observe,
        differentiate_loss: Callable[[Tensor], None],
        before_last_backward: Callable[[float], None],
        weights: LossWeights,
        identity: BatchIdentity,
        received: list[Any] | None = None,
    ) -> TrainingStageStep | None:
        """Run a training step forward and back.

        Args:
            step: the user's step as a function of a part of the batch.
            microbatches: the parts of the batch.
            observe: context around the step on one micro-batch.
            differentiate_loss: differentiates a weighted loss.
            before_last_backward: called before the last backward pass of this process, with the
                factor that gradients are to be multiplied by once they are final.
            weights: what the micro-batches' losses count for.
            identity: of the batch.
            received: if given, filled with what the last stage receives for each micro-batch.

        Returns:
            The last stage's step, which has the loss and the outputs; None on other ranks.
        """
        self.limit.begin_batch()
        first = min(self._links)
        steps = {
            stage: TrainingStageStep(
                *self._common(stage, microbatches, step, observe, identity),
                differentiate_loss=differentiate_loss,
                # Where stages share a process, the first is the last to get its gradients.
                before_last_backward=before_last_backward if stage == first else _nothing,
                weights=weights,
            )
            for stage in self._links
        }
        computes = {s: self.limit.observed(s, step.compute) for s, step in steps.items()}
        if received is not None and self._last in computes:
            computes[self._last] = _keeping(received, computes[self._last])
        engines = self._run(steps, computes, self._schedule, len(microbatches))
        self.peak_in_flight = {engine.stage: engine.peak_in_flight for engine in engines}
        return steps.get(self._last)

    def evaluate(
        self,
        step: Step,
        microbatches: Sequence[MicroBatch],
        observe: Observe,
        identity: BatchIdentity,
    ) -> StageStep | None:
        """Run a step forward only.

        Returns:
            The last stage's step, which has the outputs; None on other ranks.
        """
        steps = {
            stage: StageStep(*self._common(stage, microbatches, step, observe, identity))
            for stage in self._links
        }
        computes = {stage: step.compute for stage, step in steps.items()}
        self._run(steps, computes, ForwardOnly, len(microbatches))
        return steps.get(self._last)

    def again(
        self, step: Step, microbatches: Sequence[MicroBatch], observe: Observe, received: list[Any]
    ) -> list[Any]:
        """Run the last stage's part of a step once more, forward only and with no message.

        Args:
            step: the user's step as a function of a part of the batch.
            microbatches: parts of the batch.
            observe: context around the step on one micro-batch.
            received: what the last stage receives for each of them.

        Returns:
            What the step returned for each.
        """
        identity = BatchIdentity(0 if received[0] is None else received[0].fingerprint)
        stage = StageStep(*self._common(self._last, microbatches, step, observe, identity))
        with self._randomness.protected():
            for microbatch, activation in enumerate(received):
                stage.compute(microbatch, activation)
        return stage.outputs

    def _common(
        self,
        stage: int,
        microbatches: Sequence[MicroBatch],
        step: Step,
        observe: Observe,
        identity: BatchIdentity,
    ) -> tuple[Any, ...]:
        """The arguments of every step of a stage."""
        shared = self._randomness, self._tracker, identity
        return self._layers, stage, microbatches, step, observe, *shared

    def _run(
        self,
        steps: Mapping[int, StageStep],
        computes: Mapping[int, engine.Compute],
        schedule: type[Schedule],
        microbatches: int,
    ) -> list[StageEngine]:
        stages = self._last + 1
        engines = [
            StageEngine(
                stage,
                stages,
                schedule(stage, stages, microbatches, self.limit.value),
                self._links[stage],
                computes[stage],
                step.differentiate,
            )
            for stage, step in steps.items()
        ]
        with self._randomness.batch():
            engine.run(engines)
        return engines


def _keeping(received: list[Any], compute: engine.Compute) -> engine.Compute:
    def keeping(microbatch: int, activation: Any) -> Any:
        received.append(activation)
        return compute(microbatch, activation)

    return keeping


def _nothing(factor: float) -> None:
    pass
