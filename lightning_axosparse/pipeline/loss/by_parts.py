"""Differentiates the losses of micro-batches one by one, as soon as they are there.

So a stage holds few micro-batches at a time. It is right for losses that are means or sums over
samples; the first micro-batch that shows another one makes the batch void: its gradients are
dropped, and it runs again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.distributed.token_exchange import exchange_nothing
from lightning_axosparse.pipeline.crossing.message import Activation, Gradients, Message, relink
from lightning_axosparse.pipeline.crossing.placeholder import FirstRead
from lightning_axosparse.pipeline.joining import Axis, axes, keyed_values
from lightning_axosparse.pipeline.loss.operators import Note, Total
from lightning_axosparse.pipeline.loss.separable import SampleTracker
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.stage_forward import Visit
from lightning_axosparse.pipeline.stage_step import (
    NOTHING,
    Again,
    Batch,
    TrainingStageStep,
    loss_of,
)
from lightning_axosparse.support.object_trees import object_leaves


class PartLog(Protocol):
    """What the steps of micro-batches log: ``strategy.step.effects.StepEffects``."""

    def of_part(self, note_of: Callable[[Tensor], Note]) -> Any:
        """Make a context in which a step on a micro-batch logs, and all else is discarded."""

    def combined(self, sizes: Sequence[int]) -> Sequence[Any] | None:
        """What the batch logs, of what its micro-batches have; None if these do not make it up."""

    def part_has_others(self, output: Any) -> bool:
        """Whether that step has done something else that counts, or returned it."""


class FollowedLosses:
    """The losses of the micro-batches of a batch, and what they are.

    Args:
        batch: the batch.
        tracker: follows what steps make of samples.
        stage: the stage that runs them.
        may_guess: whether a loss of which nothing is known counts as a mean over samples.

    Attributes:
        weights: of the losses.
        losses: the losses.
        functions: hashes of the functions that steps have called; with the numbers that these were
            given where the batch has numbers or texts, which may be those.
    """

    def __init__(
        self, batch: Batch, tracker: SampleTracker, stage: int, may_guess: bool = False
    ) -> None:
        self._batch, self._tracker, self._stage = batch, tracker, stage
        self.weights = LossWeights(batch.sizes, may_guess)
        self.losses: list[Tensor] = []
        self.functions: set[int] = set()
        self._ways: dict[int, int] = {}
        leaves = object_leaves(batch.whole.batch, (Tensor, int, float, str, np.ndarray))
        self._wholes = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._has_numbers = len(self._wholes) < len(leaves)

    def begin_batch(self, given: Any, part: MicroBatch, received: Activation) -> None:
        """Take in the micro-batch whose run begins, and what it received."""
        self._tracker.begin(part.size, self._batch.numbers.get(self._stage))
        for _, value in keyed_values(received):
            if isinstance(value, Tensor):
                self._tracker.add(value, self._by_shape(value))
        for whole, own in zip(self._wholes, object_leaves(given, Tensor), strict=False):
            if own.shape == whole.shape and len(self._batch.microbatches) > 1:
                is_alike = own.dim() > 0 or torch.equal(whole, own)
                self._tracker.add(own, "alike" if is_alike else None)
            else:
                found = axes(whole.shape, own.shape, self._batch.whole.size, part.size)
                self._tracker.add(own, found[0] if found else None)

    def follow_output(self, output: Any) -> None:
        """Take in what the last layer gives; what was called before it is seen in that."""
        self._tracker.begin_end()
        known = self._batch.layouts.known
        for leaf, tensor in enumerate(object_leaves(output, Tensor)):
            self._tracker.add(tensor, known.get(("output", leaf), self._by_shape(tensor)))

    def follow_layer(self, output: Any) -> None:
        """Take in what another layer gives."""
        for tensor in object_leaves(output, Tensor):
            self._tracker.add(tensor, self._by_shape(tensor))

    def _by_shape(self, tensor: Tensor) -> Axis | None:
        """How the samples mostly lie, where no comparison has shown it."""
        return Axis(0) if tensor.shape[:1] == (self._tracker.samples,) else None

    def add(self, output: Any, part: MicroBatch) -> None:
        """Take in what the step has returned for a micro-batch."""
        self.losses.append(loss_of(output))
        functions, program = self._tracker.functions, self._tracker.program
        note = self._tracker.of_tensor(self.losses[-1])
        self.weights.add(note)
        kind = note.kind if isinstance(note, Total) else None
        self.functions.add(hash((program if self._has_numbers else functions, kind)))
        ways = {0: functions, part.size: program}  # Numbers may follow from the samples.
        if any(self._ways.setdefault(size, way) != way for size, way in ways.items()):
            self.weights.fail("micro-batches compute it in different ways")


class PartedStageStep(TrainingStageStep):
    """The last stage where losses are differentiated micro-batch by micro-batch.

    Args:
        shared: as for :class:`TrainingStageStep`.
        tracker: follows what steps make of samples.
        log: what they log.
        keeps: whether what layers give is kept, for a run of the end of the step on the batch.
        known: the functions that steps call where comparison has shown that this is right; None
            where there was none.
        may_guess: whether a loss of which nothing is known counts as a mean over samples.
        more: as for :class:`TrainingStageStep`.
    """

    def __init__(
        self,
        *shared: Any,
        tracker: SampleTracker,
        log: PartLog,
        keeps: bool,
        known: Collection[int] | None,
        may_guess: bool,
        **more: Any,
    ) -> None:
        super().__init__(*shared, **more)
        self._tracker, self._log, self._keeps, self._known = tracker, log, keeps, known
        self.followed = FollowedLosses(self.batch, tracker, self.stage, may_guess)
        self.activations: list[Activation] = []
        """What layers gave to the end of the step, if that is kept."""
        self.returns_mapping = False
        """Whether the step returns a dict with the loss."""
        self._count = len(self.batch.microbatches)

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        """Run the user's step on a micro-batch, to its end."""
        part, followed = self.batch.microbatches[microbatch], self.followed
        visit: Visit | None = None
        try:
            if received is not None and received.content.has_failed:
                raise FirstRead
            visit = self._visits[microbatch] = self._visit(microbatch, received or NOTHING)
            visit.ends_behind_layers, visit.behind_layers = False, followed.follow_output
            visit.behind_layer = followed.follow_layer
            visit.sent = visit.sent if self._keeps else None
            measured = self._limit.measured(self.stage, visit.tensors)
            with self._log.of_part(self._tracker.of_tensor), measured:
                output = self._run_step(visit, part, [self._tracker])
            followed.add(output, part)
            self.returns_mapping = isinstance(output, Mapping)
            if self._log.part_has_others(output) and not self._keeps:
                self.again = "has others"
        except FirstRead:
            followed.losses.append(Tensor())
            self.again = "reads"
        if visit is not None and visit.sent_here is not None:
            self.activations.append(relink(visit.sent_here)[1].content)
        return Activation()

    def _given(self, batch: Any, part: MicroBatch, visit: Visit) -> None:
        self.followed.begin_batch(batch, part, visit.received)

    def _own_gradients(self, microbatch: int) -> Gradients:
        is_last = microbatch == self._count - 1
        if is_last and not (self.again or self.problem):
            self.again = self._why_again()
        if self.again or self.problem:
            return Gradients((), None)
        return Gradients((), self.followed.weights.factor() if is_last else 1.0)

    def _why_again(self) -> Again:
        if self._known is not None and not self.followed.functions <= {*self._known}:
            return "calls others"
        is_logged = self._keeps or self._log.combined(self.batch.sizes) is not None
        return "" if is_logged else "has others"

    def _differentiate(self, microbatch: int, sent: Sequence[Tensor], gradients: Gradients) -> None:
        loss, weights = self.followed.losses[microbatch], self.followed.weights
        weight = 0.0 if self.is_void else weights.weight(microbatch)
        if weight:
            self._backward.differentiate(loss * weight)
        else:  # It counts for nothing, such as padding: its loss may be NaN.
            exchange_nothing([loss])
        self.followed.losses[microbatch] = loss.detach()

    @property
    def problem(self) -> str:
        """Why the batch has to run again as a whole; empty if it does not."""
        return self.followed.weights.problem

    @property
    def loss(self) -> Tensor:
        """The loss of the batch."""
        return self.followed.weights.combined(self.followed.losses)
