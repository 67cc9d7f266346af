"""Stepping: what a step of Lightning becomes, from a whole batch to what every stage returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_axosparse.adapters.gradients import ParkedGradients
from lightning_axosparse.adapters.logging import MicrobatchLog, silence_sync_advice
from lightning_axosparse.adapters.metrics import PipelinedMetrics
from lightning_axosparse.adapters.precision import scale_loss
from lightning_axosparse.adapters.sampling import agree_randomness, check_same_batch
from lightning_axosparse.deployment import Deployment
from lightning_axosparse.pipeline.limit import Limit
from lightning_axosparse.pipeline.microbatch import MicroBatch, merge, split, weigh
from lightning_axosparse.pipeline.pipeline import Pipeline
from lightning_axosparse.pipeline.randomness import Randomness
from lightning_axosparse.pipeline.schedule import Schedule
from lightning_axosparse.pipeline.step import StageStep

_CHECKED_BATCHES = 2

SplitBatch = Callable[[Any, int], "list[Any]"]


def cut(batch: Any, microbatches: int, split_batch: SplitBatch | None) -> list[MicroBatch]:
    """Cut a batch as the user wants it, or along the first dimension of its tensors."""
    if split_batch is None:
        return split(batch, microbatches)
    return weigh(split_batch(batch, microbatches))


class Stepper:
    """Runs the steps of a deployed module.

    Args:
        deployment: the part of the module on this rank.
        trainer: the running Trainer.
        precision: the pipeline's precision plugin.
        schedule: class of the training schedule.
        limit: most micro-batches that a stage may hold.
        cut: cuts a batch into micro-batches.
    """

    def __init__(
        self,
        deployment: Deployment,
        trainer: pl.Trainer,
        precision: Precision,
        schedule: type[Schedule],
        limit: Limit,
        cut: Callable[[Any], list[MicroBatch]],
    ) -> None:
        module, grid, groups = deployment.module, deployment.grid, deployment.groups
        ranks = grid.pipeline(grid.replica)
        agree_randomness(groups.inter, ranks[0])
        self.pipeline = Pipeline(
            deployment.layers,
            deployment.links(limit.largest),
            schedule,
            limit,
            Randomness(torch.initial_seed(), deployment.last_stage + 1, deployment.device),
        )
        self.metrics = PipelinedMetrics(
            module,
            groups.inter,
            groups.data,
            last_stage_rank=ranks[-1],
            is_last_stage=deployment.runs_last_stage,
        )
        self.metrics.attach()
        self._log = MicrobatchLog(module)
        self._log.attach()
        if groups.data is None:
            silence_sync_advice()
        self._deployment, self._module, self._trainer = deployment, module, trainer
        self._precision, self._cut = precision, cut
        self._parked = ParkedGradients()
        self._reduces = True
        self._unchecked_batches = _CHECKED_BATCHES

    def close(self) -> None:
        """Give the module its own logging and metrics back."""
        self._log.detach()
        self.metrics.detach()

    def train(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` forward and back.

        Returns:
            What it returned for the batch, on every stage.
        """
        microbatches = self._microbatches(batch)

        def step(part: Any) -> Any:
            with self._precision.train_step_context():
                return self._module.training_step(part, *rest, **kwargs)

        parameters = self._deployment.split.held().values()
        with torch.enable_grad(), self._parked.around_step(parameters, self._trainer):
            with self.metrics.batch(len(microbatches)):
                last = self.pipeline.train(
                    step, microbatches, self._log.microbatch, self._differentiate, self._arm_reducer
                )
            if self._deployment.reducer is not None and self._reduces:
                self._deployment.reducer.finish()
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
        microbatches = self._microbatches(batch)

        def step(part: Any) -> Any:
            with context():
                return user_step(part, *rest, **kwargs)

        with self.metrics.batch(len(microbatches)):
            last = self.pipeline.evaluate(step, microbatches, self._log.microbatch)
        return self._conclude(last, microbatches)

    def hand_over_gradients(self, loss: Tensor) -> Tensor:
        """Be Lightning's backward: the hooks, and the gradients that are there already."""
        # The hooks alone: a plugin's own pre_backward would scale the loss, which is done.
        Precision.pre_backward(self._precision, loss, self._module)
        self._parked.bring_back()
        return Precision.post_backward(self._precision, loss, self._module)

    @contextmanager
    def gradients_kept_local(self) -> Iterator[None]:
        """Do without the all-reduce inside the context."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def _microbatches(self, batch: Any) -> list[MicroBatch]:
        if self._unchecked_batches:
            self._unchecked_batches -= 1
            check_same_batch(batch, self._deployment.groups.inter)
        return self._cut(batch)

    def _differentiate(self, loss: Tensor) -> None:
        loss = loss / self._trainer.accumulate_grad_batches
        self._module.backward(scale_loss(self._precision, loss))

    def _arm_reducer(self) -> None:
        if self._deployment.reducer is not None and self._reduces:
            self._deployment.reducer.arm()

    def _conclude(self, last: StageStep | None, microbatches: Sequence[MicroBatch]) -> Any:
        """Let every stage log and return what the last one did."""
        result: tuple[Any, Any] = (None, None)
        if last is not None:
            output = merge(last.outputs, [part.weight for part in microbatches])
            result = self._log.combine(self.metrics.batch_value), output
        logged, output = self._deployment.groups.broadcast_along_pipeline(
            result, self._deployment.last_stage
        )
        self._log.replay(logged)
        self._log.clear()
        return move_data_to_device(output, self._deployment.device)
