"""Runs one stage's forward and backward passes over the micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from lightning_axosparse.distributed.token_exchange import exchange_nothing
from lightning_axosparse.pipeline.batch import Batch
from lightning_axosparse.pipeline.choice import InFlightLimit
from lightning_axosparse.pipeline.crossing.message import (
    NOTHING,
    Activation,
    Gradients,
    Message,
    StageReads,
)
from lightning_axosparse.pipeline.crossing.placeholder import UnsentValueError
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.pipeline.rng import SampledNumbers
from lightning_axosparse.pipeline.stage_forward import StageEdge
from lightning_axosparse.pipeline.step_front import StepFront
from lightning_axosparse.support.troubleshooting import see


class StageStep:
    """The forward passes of one stage through one batch.

    Args:
        stage: the stage.
        batch: the batch.
        front: the code before the layers, if it runs once for the batch in this process.
    """

    def __init__(self, stage: int, batch: Batch, front: StepFront | None = None) -> None:
        self.stage, self.batch, self._front = stage, batch, front
        self._keeps = stage == batch.layers.end - 1
        self.activations: list[Activation] = []
        """On the last stage, the activation of each micro-batch, with which the step ends."""

    @property
    def name(self) -> str:
        """The name of the stage's last layer, in words."""
        layers = self.batch.layers
        return repr(layers.names[layers.part(self.stage).stop - 1])

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        """Run the user's step on a micro-batch, up to the next stage's first layer.

        Returns:
            The activation to send. It is marked as failed if the batch has to run again because
            this stage, or one before it, reads a value that was not sent, for example.
        """
        message = received or NOTHING
        content = message.content
        activation = Activation(failed=content.failed)
        if content.failed is None:
            if received is not None:
                self.batch.fingerprint.validate(content.fingerprint, self.stage)
            try:
                run = self._new_run(microbatch, message)
                activation = self._passed(run, microbatch)
                if (numbers := self.batch.numbers.get(self.stage)) is not None:
                    self._check_numbers(numbers)
            except RunAgain as error:
                activation = Activation(failed=error.why)
            except Exception as error:
                activation = Activation(failed=self._why_failed(error))
        if self._keeps:
            self.activations.append(activation)
        return activation

    def _check_numbers(self, numbers: SampledNumbers) -> None:
        """Check that a micro-batch has drawn its part of the batch's random numbers.

        Raises:
            RunAgain: if numbers between layers belong to no single sample.
        """
        if numbers.mixes_between:
            raise RunAgain(Rerun.SAMPLES)
        if self._keeps and numbers.outside is not None:
            numbers.ends.append(numbers.outside)

    def _why_failed(self, error: Exception) -> Rerun:
        """Return why the batch has to run again after an error; raise the error if it has not."""
        if isinstance(error, UnsentValueError) and self.batch.may_read_more:
            return Rerun.READS
        if not self._catches(error):
            raise error
        self.batch.failures.append(f"{type(error).__name__}: {error}")
        return Rerun.FAILS

    def _catches(self, error: Exception) -> bool:
        """Whether an error only marks the activation as failed: the batch may run undivided."""
        is_explained = isinstance(error, MisconfigurationException) or is_oom_error(error)
        return self.batch.may_fail and len(self.batch.microbatches) > 1 and not is_explained

    def _new_run(self, microbatch: int, received: Message) -> StepRun:
        """Create the run of the step on a micro-batch."""
        part = self.batch.microbatches[microbatch]
        run = StepRun(
            stage=self.stage,
            received=received,
            sent=self.batch.sent(self.stage),
            seed_layers=partial(self._seed_layers, microbatch),
        )
        if self._front is not None:
            self._front.follow(run, part)
        return run

    def _seed_layers(self, microbatch: int) -> None:
        """Seed the stage's layers, which draw other numbers than the code around them."""
        numbers = self.batch.numbers.get(self.stage)
        if numbers is not None:
            numbers.begin_layers()
        self.batch.rng.seed_layers(microbatch, self.stage)

    def _passed(self, run: StepRun, microbatch: int) -> Activation:
        """Run the step up to the end of this stage, and undo its effects."""
        part = self.batch.microbatches[microbatch]
        try:
            with self.batch.effects.discarded():
                self._run_step(run, part)
                activation = Activation(is_empty=True)  # It has called no layer.
        except StageEdge as edge:
            activation = edge.activation
        return activation._replace(fingerprint=self.batch.fingerprint.checksum)

    def _run_step(self, run: StepRun, part: MicroBatch) -> Any:
        """Run the step on a micro-batch."""
        return self.batch.call(run, part, stage=self.stage)


class ProbingStep(StageStep):
    """The forward pass of one stage that records which values of other stages the step reads.

    Args:
        shared: as for :class:`StageStep`, with a batch of one micro-batch, of which all values are
            sent.
    """

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self.reads = StageReads()
        """Records the values of other stages that the stage reads."""

    def _catches(self, error: Exception) -> bool:
        return True  # The step raises it again.

    def _passed(self, run: StepRun, microbatch: int) -> Activation:
        """Run the user's step, as in a real pass, and record its reads."""
        run = replace(run, reads=self.reads)
        activation = super()._passed(run, microbatch)
        self.reads.is_complete = run.next_layer > 0
        return activation


class TrainingStageStep(StageStep):
    """The forward and backward passes of one stage through one batch.

    If the stage ``is_first_here``, the first one of this process, its last backward pass makes the
    process's gradients final, except those of the code before the layers, which is differentiated
    after it.
    """

    def __init__(
        self,
        *shared: Any,
        limit: InFlightLimit,
        is_first_here: bool,
    ) -> None:
        super().__init__(*shared)
        assert self.batch.backward is not None
        self._backward = self.batch.backward
        self._limit, self._is_first_here = limit, is_first_here
        self._runs: dict[int, StepRun] = {}
        self.rerun: Rerun | None = None
        """Why these gradients are dropped and the batch has to run again; None if it has not."""
        self.output: Any = None
        """The output of the step on the whole batch, on the last stage."""

    def backward(
        self, microbatch: int, sent: Sequence[Tensor], gradients: Gradients | None
    ) -> Rerun | None:
        """Differentiate the tensors that this stage has sent for a micro-batch.

        Returns:
            Why the batch has to run again; None if it has not.
        """
        gradients = gradients or self._own_gradients(microbatch)
        is_last_pass = microbatch == len(self.batch.microbatches) - 1
        self.rerun = self.rerun or gradients.rerun
        is_final = is_last_pass and self._is_first_here and self.rerun is None
        if is_final:
            self._backward.begin_last(() if self._front is None else self._front.parameters)
        run = self._runs.pop(microbatch, None)
        self._differentiate(microbatch, sent, gradients)
        if run is not None:
            run.validate_placeholders()
        if is_final and self._front is not None:
            self._front.backward()
            for parameter in self._front.parameters:
                self._backward.mark_final(parameter)
        return self.rerun

    def _own_gradients(self, microbatch: int) -> Gradients:
        """Return the gradients of the last stage's activation, which the end of the step gives."""
        raise NotImplementedError

    def _differentiate(self, microbatch: int, sent: Sequence[Tensor], gradients: Gradients) -> None:
        propagate(sent, gradients.tensors)

    def _passed(self, run: StepRun, microbatch: int) -> Activation:
        """Run the step, and measure the memory that it has saved when ``StageEdge`` ends it."""
        self._runs[microbatch] = run
        with self._limit.measured(self.stage, run.received.tensors):
            return super()._passed(run, microbatch)


def propagate(sent: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Propagate the gradients of the tensors that a stage has sent through the stage."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(sent, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        outputs, incoming = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, incoming)
    else:
        exchange_nothing(sent)


def loss_of(output: Any) -> Tensor:
    """Return the loss in the output of a training step."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            "In a pipeline `training_step` has to return a loss tensor, or a dict with the key "
            f"'loss', for every batch; it returned {type(output).__name__}. Lightning skips a "
            "batch for None on one process alone, since other ranks would wait for its gradients. "
            "To skip a batch, return a loss multiplied by zero." + see("steps")
        )
    return loss
