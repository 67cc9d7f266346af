"""Step: a user's whole step, run on one stage, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_axosparse.pipeline.emission import Activation
from lightning_axosparse.pipeline.message import tensors
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.randomness import Randomness
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
    """

    def __init__(
        self,
        layers: PipelinedLayers,
        stage: int,
        microbatches: Sequence[MicroBatch],
        step: Callable[[Any], Any],
        observe: Callable[[int], AbstractContextManager[None]],
        randomness: Randomness,
    ) -> None:
        self.outputs: list[Any] = []
        self._layers, self._stage, self._microbatches = layers, stage, microbatches
        self._step, self._observe, self._randomness = step, observe, randomness
        self._visits: dict[int, Visit] = {}

    @property
    def _is_last(self) -> bool:
        return self._stage == len(self._layers.parts) - 1

    def compute(self, microbatch: int, received: Any) -> Any:
        """Run the step up to the stage's edge; on the last stage to its end."""
        part = self._microbatches[microbatch]
        visit = Visit(
            self._stage,
            received or Activation(None),
            lambda: self._randomness.inside(part.number, self._stage),
        )
        self._randomness.outside(part.number)
        self._visits[microbatch] = visit
        try:
            with self._layers.visit(visit), self._observe(part.size):
                output = self._step(part.batch)
        except StageEdge as edge:
            return edge.activation
        if not self._is_last or visit.next_layer < len(self._layers.layers):
            raise MisconfigurationException(
                f"The step returned without calling layer "
                f"{self._layers.names[visit.next_layer]!r} of the pipelined container. In a "
                "pipeline every step has to call every layer once, in order."
            )
        self.outputs.append(apply_to_collection(output, Tensor, Tensor.detach))
        return output

    def differentiate(
        self, microbatch: int, output: Any, gradients: list[Tensor | None] | None
    ) -> None:
        """Send the next stage's gradients through this stage."""
        assert gradients is not None
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors(output), gradients, strict=True)
            if tensor is not None and gradient is not None and tensor.requires_grad
        ]
        if pairs:
            outputs, incoming = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, incoming)
        self._visits.pop(microbatch).check_skips(self._layers.names)


class TrainingStageStep(StageStep):
    """A training step: differentiates the loss on the last stage.

    Args:
        differentiate_loss: differentiates a micro-batch's loss, weighted by the micro-batch's share
            of the batch.
        before_last_backward: called before the backward pass that makes the gradients final.
    """

    def __init__(
        self,
        *args: Any,
        differentiate_loss: Callable[[Tensor], None],
        before_last_backward: Callable[[], None],
    ) -> None:
        super().__init__(*args)
        self._differentiate_loss = differentiate_loss
        self._before_last_backward = before_last_backward

    def differentiate(
        self, microbatch: int, output: Any, gradients: list[Tensor | None] | None
    ) -> None:
        """Differentiate the loss, or send the next stage's gradients through this stage."""
        if microbatch == len(self._microbatches) - 1:
            self._before_last_backward()
        if not self._is_last:
            super().differentiate(microbatch, output, gradients)
            return
        self._differentiate_loss(loss_of(output) * self._microbatches[microbatch].weight)
        self._visits.pop(microbatch).check_skips(self._layers.names)

    def loss(self) -> Tensor:
        """The loss of the whole batch, on the last stage: the weighted mean over micro-batches."""
        weights = [part.weight for part in self._microbatches]
        losses = [
            loss_of(output) * weight for output, weight in zip(self.outputs, weights, strict=True)
        ]
        return torch.stack(losses).sum(0)


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
