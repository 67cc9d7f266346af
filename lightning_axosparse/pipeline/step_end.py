"""Runs the end of the step, the code behind the last layer, once on the whole batch.

It is one more stage, without layers and with one micro-batch, on the rank of the last stage: the
layer outputs of all micro-batches are joined and become leaves, and the user's step runs once on
the whole batch, in which every layer returns its joined outputs. Loss, logs, prints, output,
metrics and attributes are those of one process, because it is the same call. The backward passes of
the micro-batches begin with the gradients of the leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from lightning_axosparse.pipeline.batch import Batch
from lightning_axosparse.pipeline.crossing.message import (
    EMPTY,
    Activation,
    Gradients,
    Message,
    StageReads,
)
from lightning_axosparse.pipeline.crossing.placeholder import UnsentValueError
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.pipeline.joining import Joined, join, sent_tensors
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.pipeline.stage_step import TrainingStageStep, loss_of
from lightning_axosparse.support.torch_internals import never_compiled, paused


class StepEnd:
    """The end of the step on the whole batch, in which every layer returns its joined outputs."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._ended: tuple[Joined, StepRun] | None = None
        """The layer outputs of the run that counts, and the run."""

    def join(self, activations: Sequence[Activation]) -> Joined:
        """Join the layer outputs of the micro-batches."""
        batch = self._batch
        return join(activations, batch.sizes, batch.layouts)

    def run(self, activations: Sequence[Activation]) -> Any:
        """Run the user's step, let its effects count, and return its output.

        Raises:
            RunAgain: if the batch has to run again.
        """
        failed = next((each.failed for each in activations if each.failed is not None), None)
        if failed is not None:
            raise RunAgain(failed)
        batch = self._batch
        joined = self.join(activations)
        draws = None if batch.numbers else batch.rng.noticed_draws()
        run = StepRun(
            stage=batch.layers.end,
            received=Message(joined.activation, joined.tensors),
            sent=None,
            draws=draws,
            behind_layers=partial(_behind_layers, batch),
        )
        self._ended = joined, run
        with batch.effects.counted():
            try:
                return batch.call(run, batch.whole, counts=True)
            except UnsentValueError as error:
                if not batch.may_read_more:
                    raise
                raise RunAgain(Rerun.READS) from error

    def gradients(self) -> list[list[Tensor | None]]:
        """Return the gradients of each micro-batch's layer outputs, after the backward pass."""
        return self.validated().gradients(len(self._batch.microbatches))

    def validated(self) -> Joined:
        """Check, after all backward passes, how the run has used unsent values.

        Return its layer outputs.
        """
        assert self._ended is not None
        (joined, run), self._ended = self._ended, None
        run.validate_placeholders()
        return joined

    def rehearse(self, part: MicroBatch, message: Message, reads: StageReads | None = None) -> Any:
        """Run the end of the step on a part of the batch, in a context that undoes its effects.

        Args:
            part: a micro-batch, or the whole batch.
            message: the layer outputs.
            reads: records the values of the stages that the step reads.
        """
        batch = self._batch
        run = StepRun(stage=batch.layers.end, received=message, sent=None, reads=reads)
        output = batch.call(run, part)
        run.progress.placeholders.clear()  # No backward pass checks them.
        return output


@never_compiled  # The last layer calls it, which may be compiled.
def _behind_layers(batch: Batch, run: StepRun) -> AbstractContextManager[object]:
    """Check the random numbers, and those that Python has read, up to here.

    Return the context for the rest of the run.
    """
    read = run.received.content.numbers
    if len(batch.microbatches) > 1 and tuple(run.numbers) != read:
        raise RunAgain(Rerun.SAMPLES)  # It may have taken another branch.
    context = ExitStack()
    context.enter_context(batch.effects.behind_layers())
    numbers = batch.numbers.get(batch.layers.end)
    # Else NumPy or Python draw a number for each sample.
    if numbers is not None and not all(e.match_python_and_numpy() for e in numbers.ends):
        raise RunAgain(Rerun.SAMPLES)
    if run.draws is not None:
        if run.draws.has_drawn():
            raise RunAgain(Rerun.DRAWS)
        context.enter_context(paused([run.draws]))
    return context


def run_undivided(batch: Batch) -> Any:
    """Run the step on the whole batch, in a process that has all layers.

    Its effects count, and nothing has to observe it.
    """
    run = StepRun(stage=0, sent=None, ends_behind_layers=False)
    batch.rng.begin_run()
    with batch.effects.counted(), batch.layers.running(run), batch.precision():
        output = batch.step(batch.whole.batch, *batch.args, **batch.kwargs)
        batch.layers.end_step(run, output, may_call_none=batch.backward is None)
    return output


class WholeStageStep(TrainingStageStep):
    """The forward and the backward pass of a step on the whole batch, in one process."""

    def forward(self, microbatch: int, received: Any) -> Activation:
        """Run the user's step on the batch."""
        self.output = run_undivided(self.batch)
        return EMPTY

    def _own_gradients(self, microbatch: int) -> Gradients:
        return Gradients(())

    def _differentiate(self, *_: Any) -> None:
        self._backward.differentiate(loss_of(self.output))


class EndedStageStep(TrainingStageStep):
    """The last stage, if the loss of the whole batch is differentiated, once."""

    def __init__(self, *shared: Any, **more: Any) -> None:
        super().__init__(*shared, **more)
        self._end = StepEnd(self.batch)
        self._gradients: list[list[Tensor | None]] = []

    def forward(self, microbatch: int, received: Any) -> Activation:
        """Run the user's step on a micro-batch; after the last one, also run its end."""
        activation = super().forward(microbatch, received)
        if len(self.activations) == len(self.batch.microbatches):
            try:
                self.output = self._end.run(self.activations)
            except RunAgain as error:
                self.rerun = error.why
        return activation

    def _own_gradients(self, microbatch: int) -> Gradients:
        if self.rerun is not None:
            unknown = [None] * len(sent_tensors(self.activations[microbatch]))
            return Gradients(unknown, self.rerun)
        if not self._gradients:
            self._backward.differentiate(loss_of(self.output))
            self._gradients = self._end.gradients()
        return Gradients(self._gradients[microbatch])
