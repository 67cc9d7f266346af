"""Stepping: what a step of Lightning becomes, from a whole batch to what every stage returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_axosparse.adapters.gradients import ParkedGradients, gradients_are_seen
from lightning_axosparse.adapters.logging import MicrobatchLog, silence_sync_advice
from lightning_axosparse.adapters.metrics import PipelinedMetrics
from lightning_axosparse.adapters.precision import pipeline_precision, scale_loss
from lightning_axosparse.adapters.sampling import agree_randomness, check_same_batch
from lightning_axosparse.cutting import Cutter
from lightning_axosparse.deployment import Deployment
from lightning_axosparse.pipeline.limit import Limit
from lightning_axosparse.pipeline.microbatch import MicroBatch, merge, share
from lightning_axosparse.pipeline.pipeline import Pipeline
from lightning_axosparse.pipeline.randomness import Randomness
from lightning_axosparse.pipeline.schedule import Schedule
from lightning_axosparse.pipeline.step import StageStep

_CHECKED_BATCHES = 2


class Stepper:
    """Runs the steps of a deployed module.

    Args:
        trainer: the running Trainer.
        precision: the pipeline's precision plugin.
        schedule: class of the training schedule.
        cutter: cuts batches into micro-batches.
        steps_in_parts: whether the optimizer will ask :meth:`await_gradients` for every part of
            the gradients that it is about to use.
    """

    pipeline: Pipeline
    metrics: PipelinedMetrics

    def __init__(
        self,
        trainer: pl.Trainer,
        precision: Precision,
        schedule: type[Schedule],
        cutter: Cutter,
        steps_in_parts: bool,
    ) -> None:
        self._trainer, self._precision = trainer, precision
        self._schedule, self._cutter = schedule, cutter
        self._parked = ParkedGradients()
        self._randomness: Randomness | None = None
        self._reduces = True
        self._awaits = not steps_in_parts or gradients_are_seen(trainer)

    def open(self, deployment: Deployment, limit: Limit) -> None:
        """Begin to run steps on a deployment; once it is closed, another may follow.

        Args:
            deployment: the part of the module on this rank.
            limit: most micro-batches that a stage may hold.
        """
        module, grid, groups = deployment.module, deployment.grid, deployment.groups
        held = deployment.split.held()
        counted = {held[name] for name in deployment.split.counted()}
        pipeline_precision(self._precision, groups.inter, groups.world, counted.__contains__)
        agree_randomness(groups.feed, grid.fed_alike[0])
        if self._randomness is None:
            stages = deployment.last_stage + 1
            self._randomness = Randomness(torch.initial_seed(), stages, deployment.device)
        self.pipeline = Pipeline(
            deployment.layers,
            deployment.links(limit.largest),
            self._schedule,
            limit,
            self._randomness,
        )
        self.metrics = PipelinedMetrics(
            module,
            groups.inter,
            groups.data,
            last_stage_rank=grid.pipeline(grid.replica)[-1],
            is_last_stage=deployment.runs_last_stage,
        )
        self.metrics.attach()
        self._log = MicrobatchLog(module)
        self._log.attach()
        if groups.feeds is None:
            silence_sync_advice()
        self._deployment, self._module = deployment, module
        self._unchecked_batches = _CHECKED_BATCHES

    def close(self) -> None:
        """Give the module its own logging and metrics back, with the states that count."""
        self._log.detach()
        self.metrics.detach()
        if not self._deployment.runs_last_stage:
            self.metrics.reset()

    def train(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` forward and back.

        Returns:
            What it returned for the batch, on every stage.
        """
        self._check(batch)
        microbatches = self._cutter.cut_to_train(batch, rest, self._deployment.groups)
        own = self._own(microbatches)

        def step(part: Any) -> Any:
            with self._precision.train_step_context():
                return self._module.training_step(part, *rest, **kwargs)

        parameters = self._deployment.split.held().values()
        with torch.enable_grad(), self._parked.around_step(parameters, self._trainer):
            if not own:
                self._arm_reducer()
            with self.metrics.batch(len(microbatches)):
                last = self.pipeline.train(
                    step, own, self._log.microbatch, self._differentiate, self._arm_reducer
                )
            if self._deployment.reducer is not None and self._reduces:
                self._deployment.reducer.send_rest()
                if self._awaits:
                    self.await_gradients(parameters)
        return self._conclude(last, microbatches)

    def evaluate(
        self,
        user_step: Callable[..., Any],
        context: Callable[[], AbstractContextManager[None]],
        batch: Any,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        """Run one of the module's other steps forward.

        Returns:
            What it returned for the batch, on every stage.
        """
        self._check(batch)
        microbatches = self._cutter.cut_to_evaluate(batch, rest, self._deployment.groups)

        def step(part: Any) -> Any:
            with context():
                return user_step(part, *rest, **kwargs)

        with self.metrics.batch(len(microbatches)):
            last = self.pipeline.evaluate(step, self._own(microbatches), self._log.microbatch)
        return self._conclude(last, microbatches)

    def hand_over_gradients(self, loss: Tensor) -> Tensor:
        """Be Lightning's backward: the hooks, and the gradients that are there already."""
        # The hooks alone: a plugin's own pre_backward would scale the loss, which is done.
        Precision.pre_backward(self._precision, loss, self._module)
        self._parked.bring_back()
        return Precision.post_backward(self._precision, loss, self._module)

    def await_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until the gradients of these parameters are final."""
        if self._deployment.reducer is not None:
            self._deployment.reducer.wait_for(parameters)

    @contextmanager
    def gradients_kept_local(self) -> Iterator[None]:
        """Do without the all-reduce inside the context."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def _check(self, batch: Any) -> None:
        if self._unchecked_batches:
            self._unchecked_batches -= 1
            check_same_batch(batch, self._deployment.groups.feed)

    def _own(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro-batches that this replica computes; the others are those it shares with."""
        grid = self._deployment.grid
        return share(microbatches, grid.share, grid.sharing)

    def _differentiate(self, loss: Tensor) -> None:
        loss = loss / self._trainer.accumulate_grad_batches
        self._module.backward(scale_loss(self._precision, loss))

    def _arm_reducer(self) -> None:
        if self._deployment.reducer is not None and self._reduces:
            self._deployment.reducer.arm()

    def _conclude(self, last: StageStep | None, microbatches: Sequence[MicroBatch]) -> Any:
        """Let every stage log and return what the last one did."""
        groups, last_stage = self._deployment.groups, self._deployment.last_stage
        result: tuple[Any, Any] = (None, None)
        if last is not None:
            outputs = self._whole(last.outputs)
            if outputs:
                weights = [part.weight for part in microbatches]
                output = merge(outputs, weights, [part.size for part in microbatches])
                result = self._log.combine(self.metrics.batch_value), output
        logged, output = groups.broadcast_to_feed(result, last_stage)
        self._log.replay(logged)
        self._log.clear()
        return move_data_to_device(output, self._deployment.device)

    def _whole(self, outputs: list[Any]) -> list[Any]:
        """Join what the replicas that share a batch did; the first gets all, others nothing."""
        groups, last_stage = self._deployment.groups, self._deployment.last_stage
        if groups.grid.sharing == 1:
            return outputs
        mine = move_data_to_device(outputs, "cpu"), self._log.recorded(), self.metrics.recorded()
        shares = groups.gather_shares(mine, last_stage)
        self.metrics.join([twins for _, _, twins in shares])
        for _, calls, _ in shares[1:]:
            self._log.add(calls)
        return [output for outputs, _, _ in shares for output in outputs]
