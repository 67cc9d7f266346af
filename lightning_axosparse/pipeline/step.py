"""Step: a user's whole step, run on one stage, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_axosparse.pipeline.batch_identity import BatchIdentity
from lightning_axosparse.pipeline.emission import Activation
from lightning_axosparse.pipeline.engine import Gradients
from lightning_axosparse.pipeline.loss_weights import LossWeights
from lightning_axosparse.pipeline.message import tensors
from lightning_axosparse.pipeline.microbatch import MicroBatch, Scalar
from lightning_axosparse.pipeline.randomness import Randomness
from lightning_axosparse.pipeline.reductions import Reductions, ReductionTracker, Weighting
from lightning_axosparse.pipeline.stage import PipelinedLayers, StageEdge, Visit


class StageStep:
    """What one stage does in a step.

    Args:
        layers: the dealt layers.
        stage: index of the stage.
        microbatches: the parts of the batch.
        step: the user's step as a function of a part of the batch.
        observe: context around the step on one micro-batch, in which its logging is recorded.
        randomness: random numbers of the pipeline.
        tracker: follows the reductions in the step of the last stage, if there are several
            micro-batches.
        identity: of the whole batch; a message of another batch is refused.
    """

    def __init__(
        self,
        layers: PipelinedLayers,
        stage: int,
        microbatches: Sequence[MicroBatch],
        step: Callable[[Any], Any],
        observe: Callable[[MicroBatch], AbstractContextManager[None]],
        randomness: Randomness,
        tracker: ReductionTracker,
        identity: BatchIdentity,
    ) -> None:
        self.outputs: list[Any] = []
        self._layers, self._stage, self._microbatches = layers, stage, microbatches
        self._step, self._observe, self._randomness = step, observe, randomness
        self._tracker, self._identity = tracker, identity
        self._visits: dict[int, Visit] = {}

    @property
    def _is_last(self) -> bool:
        return self._stage == len(self._layers.parts) - 1

    def compute(self, microbatch: int, received: Any) -> Any:
        """Run the step up to the stage's edge; on the last stage to its end."""
        part = self._microbatches[microbatch]
        if received is not None:
            self._identity.validate(received.fingerprint, self._stage)
        visit = Visit(
            self._stage,
            received or Activation(None),
            lambda: self._randomness.inside(part.number, self._stage),
            self._tracker.paused,
        )
        self._randomness.outside(part.number)
        self._visits[microbatch] = visit
        try:
            with self._layers.visit(visit), self._tracked(part), self._observe(part):
                output = self._step(part.batch)
        except StageEdge as edge:
            return edge.activation._replace(fingerprint=self._identity.fingerprint)
        if not self._is_last or visit.next_layer < len(self._layers.layers):
            raise MisconfigurationException(
                f"The step returned without calling layer "
                f"{self._layers.names[visit.next_layer]!r} of the pipelined container. In a "
                "pipeline every step has to call every layer once, in order."
            )
        self.outputs.append(apply_to_collection(output, Tensor, self._detached))
        return output

    def differentiate(self, microbatch: int, output: Any, gradients: Gradients | None) -> float:
        """Send the next stage's gradients through this stage."""
        assert gradients is not None
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors(output), gradients.tensors, strict=True)
            if tensor is not None and gradient is not None and tensor.requires_grad
        ]
        if pairs:
            outputs, incoming = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, incoming)
        self._visits.pop(microbatch).check_skips(self._layers.names)
        return gradients.factor

    def _tracked(self, part: MicroBatch) -> AbstractContextManager[None]:
        is_whole_batch = len(self._microbatches) == 1 and part.weight == 1
        if self._is_last and not is_whole_batch:
            return self._tracker.microbatch(part.size, part.batch)
        return nullcontext()

    def _detached(self, tensor: Tensor) -> Any:
        """A tensor of the step's output; scalars with how they count in the batch's."""
        if tensor.dim():
            return tensor.detach()
        return Scalar(tensor.detach(), Weighting.of(self._tracker.of(tensor)))


class TrainingStageStep(StageStep):
    """A training step: differentiates the loss on the last stage.

    Args:
        differentiate_loss: differentiates a micro-batch's loss, which has been weighted.
        before_last_backward: called before the backward pass that makes the gradients final, with
            the factor that they are then to be multiplied by.
        weights: what the micro-batches' losses count for, on the last stage.
    """

    def __init__(
        self,
        *args: Any,
        differentiate_loss: Callable[[Tensor], None],
        before_last_backward: Callable[[float], None],
        weights: LossWeights,
    ) -> None:
        super().__init__(*args)
        self.losses: list[Reductions] = []
        """What the loss of each micro-batch came from, on the last stage."""
        self._differentiate_loss = differentiate_loss
        self._before_last_backward = before_last_backward
        self._weights = weights

    def compute(self, microbatch: int, received: Any) -> Any:
        """Run the step up to the stage's edge; on the last stage to the loss."""
        output = super().compute(microbatch, received)
        if self._is_last:
            self.losses.append(self._tracker.of(loss_of(output)))
            weighting = self._weights.add(self.losses[-1])
            self.outputs[-1] = _with_weighting(self.outputs[-1], weighting)
            self._tracker.forget()
        return output

    def differentiate(self, microbatch: int, output: Any, gradients: Gradients | None) -> float:
        """Differentiate the loss, or send the next stage's gradients through this stage."""
        is_last = microbatch == len(self._microbatches) - 1
        factor = 1.0 if gradients is None else gradients.factor
        if is_last and self._is_last:
            factor = self._weights.factor()
        if is_last:
            self._before_last_backward(factor)
        if not self._is_last:
            return super().differentiate(microbatch, output, gradients)
        weight = self._weights.weight(microbatch)
        # The loss of a micro-batch that counts for nothing, such as one of padding, may be NaN.
        if weight:
            self._differentiate_loss(loss_of(output) * weight)
        self._visits.pop(microbatch).check_skips(self._layers.names)
        return factor


def _with_weighting(output: Any, weighting: Weighting) -> Any:
    """What a training step returned, with its loss weighted as the gradients are.

    A loss may also have the shape ``(1,)``.
    """
    if isinstance(output, Scalar):
        return output._replace(weighting=weighting)
    if isinstance(output, Tensor):
        return Scalar(output, weighting)
    if isinstance(output, dict):
        output["loss"] = _with_weighting(output["loss"], weighting)
    return output


def loss_of(output: Any) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        MisconfigurationException: if there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            "In a pipeline `training_step` has to return a loss tensor, or a dict with the key "
            f"'loss', for every batch; it returned {type(output).__name__}. To skip a batch, "
            "return a loss multiplied by zero."
        )
    return loss
