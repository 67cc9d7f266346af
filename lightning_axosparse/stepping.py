"""Stepping: what a step of Lightning becomes, from a whole batch to what every stage returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_axosparse.adapters.gradients import (
    ParkedGradients,
    gradients_are_seen,
    starts_accumulation,
)
from lightning_axosparse.adapters.logging import MicrobatchLog, silence_sync_advice
from lightning_axosparse.adapters.meetings import position
from lightning_axosparse.adapters.metrics import PipelinedMetrics
from lightning_axosparse.adapters.precision import pipeline_precision, scale_loss
from lightning_axosparse.adapters.sampling import agree_randomness
from lightning_axosparse.cutting import Cutter
from lightning_axosparse.deployment import Deployment
from lightning_axosparse.pipeline.batch_identity import BatchIdentity, fingerprint
from lightning_axosparse.pipeline.limit import Limit
from lightning_axosparse.pipeline.loss_check import check_loss
from lightning_axosparse.pipeline.loss_weights import (
    LossRule,
    LossWeights,
    validate_losses,
    weigh_by,
)
from lightning_axosparse.pipeline.microbatch import MicroBatch, merge, share
from lightning_axosparse.pipeline.pipeline import Pipeline
from lightning_axosparse.pipeline.randomness import Randomness
from lightning_axosparse.pipeline.reductions import ReductionTracker
from lightning_axosparse.pipeline.schedule import Schedule
from lightning_axosparse.pipeline.step import StageStep
from lightning_axosparse.reduce import GradientReducer


class Stepper:
    """Runs the steps of a deployed module.

    Args:
        trainer: the running Trainer.
        precision: the pipeline's precision plugin.
        schedule: class of the training schedule.
        cutter: cuts batches into micro-batches.
        rule: how the losses of micro-batches make up that of the batch.
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
        rule: LossRule,
        steps_in_parts: bool,
    ) -> None:
        self._trainer, self._precision = trainer, precision
        self._schedule, self._cutter, self._rule = schedule, cutter, rule
        self._tracker = ReductionTracker()
        self._advice: set[str | None] = {None}
        self._parked = ParkedGradients()
        self._factor = 1.0
        self._checks_loss = rule.check
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
            self._tracker,
        )
        self.metrics = PipelinedMetrics(
            module,
            groups.inter,
            groups.data,
            last_stage_rank=grid.pipeline(grid.replica)[-1],
            is_last_stage=deployment.runs_last_stage,
        )
        self.metrics.attach()
        self._log = MicrobatchLog(module, self._tracker)
        self._log.attach()
        if groups.feeds is None:
            silence_sync_advice()
        self._deployment, self._module = deployment, module

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
        identity = self._identity(batch)
        microbatches = self._cutter.cut_to_train(batch, rest, self._deployment.groups)
        microbatches = self._weighed(microbatches)
        own = self._own(microbatches)
        self._factor = 1.0

        def step(part: Any) -> Any:
            with self._precision.train_step_context():
                return self._module.training_step(part, *rest, **kwargs)

        parameters = self._deployment.split.held().values()
        received: list[Any] | None = [] if self._checks_loss else None
        weights = LossWeights(
            own,
            sum(part.size for part in microbatches),
            self._rule.loss if self._rule.weight is None else "given",
            self._sum_over_sharers,
        )
        with torch.enable_grad(), self._parked.around_step(parameters):
            if not own:  # The other replicas of this batch may wait for its denominators.
                factor = weights.factor() if self._deployment.runs_last_stage else 1.0
                self._before_last_backward(factor)
            with self.metrics.batch(len(microbatches)):
                last = self.pipeline.train(
                    step,
                    own,
                    self._observe,
                    self._differentiate,
                    self._before_last_backward,
                    weights,
                    identity,
                    received,
                )
            self._finish_gradients(parameters)
        advice = None
        is_open = self._rule.loss == "auto" and self._rule.weight is None
        if last is not None and len(own) > 1 and is_open:
            advice = validate_losses(last.losses, [part.size for part in own])
        result = self._conclude(last, microbatches, identity, advice)
        if received and len(own) == len(microbatches) > 1:
            self._check_loss(step, batch, own, received)
        self._checks_loss = self._checks_loss and len(microbatches) == 1
        return result

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
        identity = self._identity(batch)
        microbatches = self._cutter.cut_to_evaluate(batch, rest, self._deployment.groups)
        microbatches = self._weighed(microbatches)

        def step(part: Any) -> Any:
            with context():
                return user_step(part, *rest, **kwargs)

        with self.metrics.batch(len(microbatches)):
            last = self.pipeline.evaluate(step, self._own(microbatches), self._observe, identity)
        return self._conclude(last, microbatches, identity)

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

    def _check_loss(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        microbatches: Sequence[MicroBatch],
        received: list[Any],
    ) -> None:
        """Compare this batch's loss with that of the batch as a whole, on the last stage."""

        def again(parts: Sequence[MicroBatch], activations: Sequence[Any]) -> list[Any]:
            return self.pipeline.again(step, parts, self._observe, list(activations))

        full_precision = str(self._trainer.precision).startswith(("32", "64"))
        with self.metrics.kept(), self.metrics.batch(len(microbatches)):
            check_loss(
                again,
                batch,
                microbatches,
                received,
                self._module,
                tolerance=1e-3 if full_precision else 3e-2,
            )
        self._log.clear()
        self._tracker.forget()

    def _sum_over_sharers(self, count: float) -> float:
        """Add a number up over the last stages of the replicas that share a batch."""
        sharers = self._deployment.groups.sharers
        if sharers is None:
            return count
        total = torch.tensor(count, dtype=torch.float64)
        dist.all_reduce(total, group=sharers)
        return float(total)

    def _before_last_backward(self, factor: float) -> None:
        """Let gradients be reduced as soon as they are final."""
        self._factor = factor
        if self._reducer is not None:
            # What `zero_grad` is going to clear is not reduced.
            adds = not starts_accumulation(self._trainer)
            self._reducer.arm(factor, self._parked.earlier if adds else None)

    def _finish_gradients(self, parameters: Collection[nn.Parameter]) -> None:
        """Reduce the gradients that have not been, and rescale those that are this rank's alone."""
        reducer = self._reducer
        if reducer is not None:
            reducer.send_rest()
            if self._awaits:
                self.await_gradients(parameters)
        if self._factor != 1:
            for parameter in parameters:
                reduced = reducer is not None and parameter in reducer.parameters
                if parameter.grad is not None and not reduced:
                    parameter.grad.mul_(self._factor)

    @property
    def _reducer(self) -> GradientReducer | None:
        """What reduces the gradients of the running batch; None while they are kept local."""
        return self._deployment.reducer if self._reduces else None

    @contextmanager
    def gradients_kept_local(self) -> Iterator[None]:
        """Do without the all-reduce inside the context."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def _identity(self, batch: Any) -> BatchIdentity:
        """What the ranks that are given this batch compare."""
        if self._deployment.groups.feed is None:
            return BatchIdentity()
        loop, epoch, index = position(self._trainer)
        return BatchIdentity(fingerprint(batch), f"batch {index} of {loop} epoch {epoch}")

    def _weighed(self, microbatches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the weights that the user's rule gives them, if there is one."""
        if self._rule.weight is None or self._trainer.predicting:
            return microbatches
        return weigh_by(self._rule.weight, microbatches)

    def _observe(self, part: MicroBatch) -> AbstractContextManager[None]:
        return self._log.microbatch(part.size, None if self._rule.weight is None else part.weight)

    def _own(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro-batches that this replica computes; the others are those it shares with."""
        grid = self._deployment.grid
        return share(microbatches, grid.share, grid.sharing)

    def _differentiate(self, loss: Tensor) -> None:
        loss = loss / self._trainer.accumulate_grad_batches
        self._module.backward(scale_loss(self._precision, loss))

    def _conclude(
        self,
        last: StageStep | None,
        microbatches: Sequence[MicroBatch],
        identity: BatchIdentity,
        advice: str | None = None,
    ) -> Any:
        """Let every stage log and return what the last one did, and say once what it advises."""
        groups, last_stage = self._deployment.groups, self._deployment.last_stage
        result: tuple[Any, Any, str | None] = (None, None, None)
        if last is not None:
            outputs = self._whole(last.outputs, identity)
            if outputs:
                weights = [part.weight for part in microbatches]
                output = merge(outputs, weights, [part.size for part in microbatches])
                result = self._log.combine(self.metrics.batch_value), output, advice
        logged, output, advice = groups.broadcast_to_feed(result, last_stage)
        if advice not in self._advice:
            self._advice.add(advice)
            rank_zero_warn(str(advice))
        self._log.replay(logged)
        self._log.clear()
        self._tracker.forget()
        return move_data_to_device(output, self._deployment.device)

    def _whole(self, outputs: list[Any], identity: BatchIdentity) -> list[Any]:
        """Join what the replicas that share a batch did; the first gets all, others nothing."""
        groups, last_stage = self._deployment.groups, self._deployment.last_stage
        if groups.grid.sharing == 1:
            return outputs
        outputs = move_data_to_device(outputs, "cpu")
        mine = identity.fingerprint, outputs, self._log.recorded(), self.metrics.recorded()
        shares = groups.gather_shares(mine, last_stage)
        if not shares:
            return []
        replicas = range(groups.grid.replica, groups.grid.replica + len(shares))
        prints = {replica: share[0] for replica, share in zip(replicas, shares, strict=True)}
        identity.compare(prints, "replica")
        self.metrics.join([twins for *_, twins in shares])
        for _, _, calls, _ in shares[1:]:
            self._log.add(calls)
        return [output for _, outputs, _, _ in shares for output in outputs]
