"""Runs one stage's forward and backward passes over the micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_axosparse.distributed.token_exchange import exchange_nothing
from lightning_axosparse.pipeline.backward.parameter_gradients import WeightGradientQueue
from lightning_axosparse.pipeline.backward.split_layers import SplitLayers
from lightning_axosparse.pipeline.batch_layout import copied
from lightning_axosparse.pipeline.choice import InFlightLimit
from lightning_axosparse.pipeline.crossing.message import (
    Activation,
    Crossing,
    Gradients,
    Reads,
    Sent,
    tensors,
)
from lightning_axosparse.pipeline.crossing.placeholder import Progress
from lightning_axosparse.pipeline.loss.outputs import Scalar, with_loss
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.pipeline.microbatch import (
    BatchFingerprint,
    MicroBatch,
    explain_statistics,
)
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers, StageEdge, Visit
from lightning_axosparse.support.troubleshooting import see

_NOTHING = Activation()


class LossBackward(Protocol):
    """Differentiates the losses of a batch: ``strategy.step.batch_gradients.BatchGradients``."""

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate the weighted loss of a micro-batch."""

    def begin_last(self, factor: float, deferred: Collection[nn.Parameter] = ()) -> None:
        """Prepare for the last backward pass of this process, which makes gradients final.

        Args:
            factor: what the gradients of the whole batch are still to be multiplied by.
            deferred: parameters whose gradients are final only when :meth:`mark_final` says so.
        """

    def mark_final(self, parameter: nn.Parameter) -> None:
        """Take in that the gradient of one of those parameters is final."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch and the step that is run on it; what all stages of this process share.

    Attributes:
        step: the user's step, called as ``step(part, *args, **kwargs)``.
        args: its arguments besides the part of the batch.
        kwargs: its keyword arguments.
        precision: makes the context in which the step runs.
        microbatches: the micro-batches that this replica computes.
        fingerprint: of the whole batch; every message carries it.
        log: makes the context that records what the step logs for a micro-batch of so many samples,
            and of this weight, if the user has given one.
        prints: makes the context that records what the step prints.
        weights_given: whether the user has given the weights of the micro-batches.
        crossing: what crosses the edges of stages; None where that is not known: everything.
        is_shared: whether other runs of the step get the same micro-batches on this rank.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    microbatches: Sequence[MicroBatch]
    fingerprint: BatchFingerprint
    log: Callable[[int, float | None], AbstractContextManager[None]]
    prints: Callable[[], AbstractContextManager[Any]] = nullcontext
    weights_given: bool = False
    crossing: Crossing | None = None
    is_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingBatch(Batch):
    """A batch to train on.

    Attributes:
        weights: the weights of the micro-batches' losses, on the last stage.
        backward: differentiates the losses.
    """

    weights: LossWeights
    backward: LossBackward


class StageStep:
    """The forward passes of one stage through one batch."""

    _may_call_no_layer, _keeps_sources = True, False
    _reads: Reads | None = None
    """Filled with what the stage reads of others; None where that is known."""

    def __init__(
        self,
        stage: int,
        batch: Batch,
        layers: PipelinedLayers,
        rng: PipelineRNG,
        tracker: ReductionTracker,
    ) -> None:
        self.outputs: list[Any] = []
        """What the step returned for each micro-batch, on the last stage."""
        self._stage, self._batch, self._layers = stage, batch, layers
        self._rng, self._tracker = rng, tracker
        self._is_last = stage == len(layers.parts) - 1
        is_whole_batch = len(batch.microbatches) == 1 and batch.microbatches[0].weight == 1
        self._tracks = self._is_last and not is_whole_batch
        crossing = batch.crossing
        self._sent = Sent() if crossing is None else crossing[stage]
        self._visits: dict[int, Visit] = {}

    def forward(self, microbatch: int, received: Activation | None) -> Any:
        """Run the user's step on a micro-batch, up to the next stage's first layer.

        Returns:
            The activation to send; on the last stage, what the step returned.
        """
        batch, part = self._batch, self._batch.microbatches[microbatch]
        if received is not None:
            batch.fingerprint.validate(received.fingerprint, self._stage)
        visit = Visit(
            self._stage,
            part.number,
            received or _NOTHING,
            self._rng,
            self._tracker if self._tracks else None,
            self._sent,
            Progress(self._stage),
            self._reads,
        )
        self._visits[microbatch] = visit
        tracked: AbstractContextManager[None] = nullcontext()
        if self._tracks:
            tracked = self._tracker.microbatch(part.size, self._keeps_sources)
        log = batch.log(part.size, part.weight if batch.weights_given else None)
        self._rng.seed_outside_layers(part.number)
        given = copied(part.batch) if batch.is_shared else part.batch
        with self._forward_context(microbatch, received):
            try:
                with batch.prints(), tracked, self._layers.visit(visit):
                    with log, batch.precision():
                        output = batch.step(given, *batch.args, **batch.kwargs)
                    self._layers.end_step(visit, output, self._may_call_no_layer)
                    if not self._is_last:  # What it logged counts on the last stage alone.
                        raise StageEdge(_NOTHING._replace(is_empty=True))
            except StageEdge as edge:
                output = edge.activation._replace(fingerprint=batch.fingerprint.fingerprint)
            except (ValueError, RuntimeError) as error:
                explain_statistics(error, part, batch.microbatches)
                raise
            else:
                self._take_output(output)
        return output

    def _forward_context(
        self, microbatch: int, received: Activation | None
    ) -> AbstractContextManager[None]:
        """Make the context in which the step runs on a micro-batch."""
        return nullcontext()

    def _take_output(self, output: Any) -> None:
        """Keep what the last stage's step returned for a micro-batch."""
        self.outputs.append(apply_to_collection(output, Tensor, self._detached))

    def _detached(self, tensor: Tensor) -> Any:
        """A tensor of the step's output; scalars with how they count in the batch's."""
        if tensor.dim():
            return tensor.detach()
        return Scalar(tensor.detach(), self._tracker.of(tensor))


class ProbingStep(StageStep):
    """One stage's forward pass through a micro-batch, of which it is seen what the step reads.

    Args:
        shared: as for :class:`StageStep`, with a batch of one micro-batch, of which everything
            crosses the edges of stages.
    """

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._reads = self.reads = Reads()
        self._tracks = False

    def forward(self, microbatch: int, received: Activation | None) -> Any:
        """Run the user's step, as in a real pass; where it fails, the next stages do nothing."""
        if received is not None and received.has_failed:
            return received
        try:
            output = super().forward(microbatch, received)
        except Exception:  # The step meets it again when it trains, and tells it.
            return _NOTHING._replace(has_failed=True)
        self.reads.is_complete = self._visits[microbatch].next_layer > 0
        return output


class TrainingStageStep(StageStep):
    """The forward and backward passes of one stage through one batch.

    The last backward pass of a stage that ``is_first_here``, in this process, makes the gradients
    of the process final.
    """

    _may_call_no_layer = False

    def __init__(
        self,
        stage: int,
        batch: TrainingBatch,
        layers: PipelinedLayers,
        rng: PipelineRNG,
        tracker: ReductionTracker,
        limit: InFlightLimit,
        split: SplitLayers,
        defers: Callable[[int], bool],
        is_first_here: bool,
    ) -> None:
        super().__init__(stage, batch, layers, rng, tracker)
        self._weights, self._backward = batch.weights, batch.backward
        self._keeps_sources = batch.weights.needs_batch
        self._sources: dict[int, list[Tensor]] = {}
        self._limit, self._is_first_here = limit, is_first_here
        self._split, self._queue = split, WeightGradientQueue(batch.backward.mark_final)
        self._defers = defers

    def backward(self, microbatch: int, output: Any, gradients: Gradients | None) -> float:
        """Differentiate a micro-batch's loss, or what this stage sent of it.

        Returns:
            What the gradients of the whole batch are still to be multiplied by, with the last
            micro-batch.
        """
        is_last_pass = microbatch == len(self._batch.microbatches) - 1
        factor = 1.0 if gradients is None else gradients.factor
        if is_last_pass and self._is_last:
            factor = self._weights.factor()
        if is_last_pass and self._is_first_here:
            self._backward.begin_last(factor, self._split.parameters)
        visit = self._visits.pop(microbatch)
        with self._deferring(microbatch, visit, gradients):
            if gradients is not None:
                _differentiate(output, gradients)
            else:
                sources = self._sources.pop(microbatch, [])
                loss = self._weights.weighted(microbatch, loss_of(output), sources)
                if loss is not None:
                    self._backward.differentiate(loss)
                else:
                    exchange_nothing([loss_of(output)])
        visit.validate_placeholders()
        if microbatch == 0:
            self._limit.measured_pending(self._stage, self._queue.bytes_of(microbatch))
        if is_last_pass:
            self._queue.end_backwards()
        return factor

    def _deferring(
        self, microbatch: int, visit: Visit, gradients: Gradients | None
    ) -> AbstractContextManager[None]:
        """Make the context of a backward pass, in which products are queued if it defers."""
        self._split.suspended = not self._defers(microbatch)
        if self._split.suspended:
            return nullcontext()
        received = [] if gradients is None else gradients.tensors
        borrowed = [*received, *tensors(visit.received)]
        return self._split.deferring(self._queue, microbatch, borrowed)

    @property
    def reordered_sums(self) -> bool:
        """Whether weight gradients that were made later stand in another order in a sum.

        It shows in batches that defer all of them: after whole backward passes there are others.
        """
        return self._queue.reordered and self._defers(0)

    def make_weight_gradient(self, microbatch: int) -> bool:
        """Make one of the weight gradients that backward passes have left.

        Returns:
            Whether those of this micro-batch are complete.
        """
        if self._queue.holds(microbatch):
            self._queue.compute_next()
        return not self._queue.holds(microbatch)

    def _forward_context(
        self, microbatch: int, received: Activation | None
    ) -> AbstractContextManager[None]:
        """Split layers if the backward pass defers, and measure what the pass leaves in memory."""
        self._split.suspended = not self._defers(microbatch)
        return self._limit.measured(self._stage, received)

    def _take_output(self, output: Any) -> None:
        super()._take_output(output)
        loss = loss_of(output)
        term = self._tracker.of(loss)
        if self._keeps_sources:
            self._sources[len(self.outputs) - 1] = self._tracker.sources(term)
        scalar = Scalar(loss.detach(), *self._weights.add(term))
        entry = {"loss": scalar} if isinstance(output, Mapping) else scalar
        self.outputs[-1] = with_loss(self.outputs[-1], entry)
        self._tracker.forget()


def _differentiate(output: Any, gradients: Gradients) -> None:
    """Propagate the gradients of what a stage sent through the stage."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors(output), gradients.tensors, strict=True)
        if tensor is not None and gradient is not None and tensor.requires_grad
    ]
    if pairs:
        outputs, incoming = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, incoming)
    else:
        exchange_nothing(tensors(output))


def loss_of(output: Any) -> Tensor:
    """The loss in what a training step returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            "In a pipeline `training_step` has to return a loss tensor, or a dict with the key "
            f"'loss', for every batch; it returned {type(output).__name__}. Lightning skips a "
            "batch for None on one process alone, since other ranks would wait for its gradients. "
            "To skip a batch, return a loss multiplied by zero." + see("steps")
        )
    return loss
