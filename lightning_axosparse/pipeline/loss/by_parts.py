"""Differentiates the loss of each micro-batch as soon as it is computed ("by parts").

A stage then holds few micro-batches at a time. This is right for losses that are means or sums over
samples. If a micro-batch shows another kind of loss, the gradients of the batch are dropped, and it
runs again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.distributed.token_exchange import exchange_nothing
from lightning_axosparse.pipeline.batch_layout import copied_batch
from lightning_axosparse.pipeline.crossing.message import (
    EMPTY,
    NOTHING,
    Activation,
    Gradients,
    Message,
    detached_message,
)
from lightning_axosparse.pipeline.crossing.placeholder import UnsentValueError
from lightning_axosparse.pipeline.joining import Axis, axes, keyed_values
from lightning_axosparse.pipeline.loss.operators import Note, Total
from lightning_axosparse.pipeline.loss.separable import SampleTracker
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.stage_forward import StepRun
from lightning_axosparse.pipeline.stage_step import Batch, Rerun, TrainingStageStep, loss_of
from lightning_axosparse.support.object_trees import object_leaves


class PartLog(Protocol):
    """The log calls of micro-batches: ``strategy.step.effects.StepEffects``."""

    def of_part(self, note_of: Callable[[Tensor], Note]) -> Any:
        """Return a context in which a run on a micro-batch logs, and other effects are undone."""

    def combined(self, sizes: Sequence[int]) -> Sequence[Any] | None:
        """Return the log calls of the batch; None if they do not follow from micro-batches."""

    def part_has_other_effects(self, output: Any) -> bool:
        """Whether that run had other effects, or returned more than the loss."""


class TrackedLosses:
    """The losses of the micro-batches of a batch, and their weights.

    Args:
        batch: the batch.
        tracker: records how tensors depend on samples.
        stage: the stage that runs the steps.
        may_guess: whether a loss of unknown form is taken for a mean over samples.

    Attributes:
        weights: the loss weights.
        losses: one scalar tensor for each micro-batch.
        functions: hashes of the functions that the steps have called. Where the batch has numbers
            or texts, they include numbers among the arguments, which may come from it.
    """

    def __init__(
        self, batch: Batch, tracker: SampleTracker, stage: int, may_guess: bool = False
    ) -> None:
        self._batch, self._tracker, self._stage = batch, tracker, stage
        self.weights = LossWeights(batch.sizes, may_guess)
        self.losses: list[Tensor] = []
        self.functions: set[int] = set()
        self._hashes: dict[int, int] = {}
        """The hash of the functions, at 0, and that of the program for each number of samples."""
        leaves = object_leaves(batch.whole.batch, (Tensor, int, float, str, np.ndarray))
        self._batch_tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._has_numbers = len(self._batch_tensors) < len(leaves)

    def begin_run(self, batch_part: Any, part: MicroBatch, received: Activation) -> None:
        """Begin a run on a micro-batch; ``received`` is the activation of the previous stage."""
        self._tracker.begin(part.size, self._batch.numbers.get(self._stage))
        for _, value in keyed_values(received):
            if isinstance(value, Tensor):
                self._tracker.add(value, self._by_shape(value))
        own_tensors = object_leaves(batch_part, Tensor)
        for whole, own in zip(self._batch_tensors, own_tensors, strict=False):
            if own.shape == whole.shape and len(self._batch.microbatches) > 1:
                is_alike = own.dim() > 0 or torch.equal(whole, own)
                self._tracker.add(own, "alike" if is_alike else None)
            else:
                candidates = axes(whole.shape, own.shape, self._batch.whole.size, part.size)
                self._tracker.add(own, candidates[0] if candidates else None)

    def track_output(self, output: Any) -> None:
        """Track the output of the last layer, and hash only the functions behind it."""
        self._tracker.begin_end()
        known = self._batch.layouts.known
        for leaf, tensor in enumerate(object_leaves(output, Tensor)):
            self._tracker.add(tensor, known.get(("output", leaf), self._by_shape(tensor)))

    def track_layer(self, output: Any) -> None:
        """Track the output of another layer."""
        for tensor in object_leaves(output, Tensor):
            self._tracker.add(tensor, self._by_shape(tensor))

    def _by_shape(self, tensor: Tensor) -> Axis | None:
        """Return the usual layout of samples, for tensors that no comparison has seen."""
        return Axis(0) if tensor.shape[:1] == (self._tracker.samples,) else None

    def add(self, output: Any, part: MicroBatch) -> None:
        """Add the loss in the output of the step on a micro-batch."""
        self.losses.append(loss_of(output))
        functions, program = self._tracker.functions, self._tracker.program
        note = self._tracker.note_of(self.losses[-1])
        self.weights.add(note)
        kind = note.kind if isinstance(note, Total) else None
        self.functions.add(hash((program if self._has_numbers else functions, kind)))
        hashes = {0: functions, part.size: program}  # Numbers may depend on the samples.
        if any(self._hashes.setdefault(size, each) != each for size, each in hashes.items()):
            self.weights.fail("micro-batches compute it in different ways")


class PartedStageStep(TrainingStageStep):
    """The last stage, where losses are differentiated by parts.

    Args:
        shared: as for :class:`TrainingStageStep`.
        tracker: records how tensors depend on samples.
        log: records the log calls of micro-batches.
        keeps: whether to keep the layer outputs, for a run of the end of the step on the batch.
        known: hashes of the functions for which a comparison has shown that by parts is right; None
            if there was no comparison.
        may_guess: whether a loss of unknown form is taken for a mean over samples.
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
        self.tracked = TrackedLosses(self.batch, tracker, self.stage, may_guess)
        self.activations: list[Activation] = []
        """The layer outputs that the end of the step receives, if they are kept."""
        self.returns_mapping = False
        """Whether the step returns a dict with the loss."""
        self._count = len(self.batch.microbatches)

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        """Run the user's step on a micro-batch, to its end."""
        part, tracked = self.batch.microbatches[microbatch], self.tracked
        run: StepRun | None = None
        try:
            if received is not None and received.content.has_failed:
                raise UnsentValueError
            run = self._runs[microbatch] = self._new_run(microbatch, received or NOTHING)
            measured = self._limit.measured(self.stage, run.received.tensors)
            with self._log.of_part(self._tracker.note_of), measured:
                batch_part = copied_batch(part.batch)
                tracked.begin_run(batch_part, part, run.received.content)
                output = self._run_step(run, part, batch_part, [self._tracker])
            tracked.add(output, part)
            if self._rng.was_used():
                tracked.weights.fail("it draws numbers from Python's or NumPy's generator")
            self.returns_mapping = isinstance(output, Mapping)
            if self._log.part_has_other_effects(output) and not self._keeps:
                self.rerun = Rerun.HAS_OTHER_EFFECTS
        except UnsentValueError:
            tracked.losses.append(Tensor())
            self.rerun = Rerun.READS
        if run is not None and run.sent_here is not None:
            self.activations.append(detached_message(run.sent_here)[1].content)
        return EMPTY

    def _new_run(self, microbatch: int, received: Message) -> StepRun:
        run = super()._new_run(microbatch, received)
        return replace(
            run,
            sent=run.sent if self._keeps else None,
            ends_behind_layers=False,
            behind_layers=self._behind_layers,
            behind_layer=self.tracked.track_layer,
        )

    def _behind_layers(self, output: Any) -> None:
        self.tracked.track_output(output)
        self._rng.watch()

    def _own_gradients(self, microbatch: int) -> Gradients:
        is_last = microbatch == self._count - 1
        if self.rerun is None:
            self.rerun = self._why_rerun(is_last)
        if self.rerun is not None:
            return Gradients((), None)
        return Gradients((), self.tracked.weights.factor() if is_last else 1.0)

    def _why_rerun(self, is_last: bool) -> Rerun | None:
        if self.problem:
            return Rerun.IS_NO_MEAN
        if not is_last:
            return None
        if self._known is not None and not self.tracked.functions <= {*self._known}:
            return Rerun.CALLS_OTHERS
        is_logged = self._keeps or self._log.combined(self.batch.sizes) is not None
        return None if is_logged else Rerun.HAS_OTHER_EFFECTS

    def _differentiate(self, microbatch: int, sent: Sequence[Tensor], gradients: Gradients) -> None:
        loss, weights = self.tracked.losses[microbatch], self.tracked.weights
        weight = 0.0 if self.is_void else weights.weight(microbatch)
        if weight:
            self._backward.differentiate(loss * weight)
        else:  # It is all padding, for example: its loss may be NaN.
            exchange_nothing([loss])
        self.tracked.losses[microbatch] = loss.detach()

    @property
    def problem(self) -> str:
        """Why the loss of the batch is no mean or sum over samples; empty if it is."""
        return self.tracked.weights.problem

    @property
    def loss(self) -> Tensor:
        """The loss of the batch."""
        return self.tracked.weights.combined(self.tracked.losses)
