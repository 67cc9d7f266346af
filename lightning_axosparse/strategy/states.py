"""The states of a strategy: at rest, running, or with a module that a run has left sharded.

All states have the same properties; one that a state does not have raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard import optimizers as stepping
from lightning_axosparse.pipeline.shard.optimizers import BucketwiseOptimizer, OptimizerShards
from lightning_axosparse.strategy.compat.callbacks import (
    parameters_told_apart_by_identity,
    validating_together,
    weight_averages,
    without_writing,
)
from lightning_axosparse.strategy.compat.gradients import (
    GradientNorms,
    clearing_is_seen,
    gradients_are_seen,
)
from lightning_axosparse.strategy.compat.internals import move_optimizers
from lightning_axosparse.strategy.compat.lockstep import LoopCheck, acting_together
from lightning_axosparse.strategy.compat.logging import advising_where
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from lightning_axosparse.strategy.regrid import Regrid
from lightning_axosparse.strategy.stages.checkpoints import StageCheckpoints
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.step.train_step import StepRunner
from lightning_axosparse.strategy.step.whole_step import StepContext, WholeStepRunner
from lightning_axosparse.support.memory import free_bytes
from lightning_axosparse.support.troubleshooting import see


class _NotRunning:
    """A state without a run."""

    @property
    def run(self) -> NoReturn:
        """The running state: raises."""
        raise RuntimeError(
            "AxoSparseStrategy holds a module only while the Trainer runs."
            + see("values-between-layers")
        )


class AtRest(_NotRunning):
    """This rank has the full module: steps and checkpoints are Lightning's own."""

    checkpoints = None

    @property
    def stage_module(self) -> StageModule:
        """The part of the module on this rank: raises."""
        return self.run

    @property
    def runner(self) -> AtRest:
        """The object that runs the module's steps."""
        return self

    def run_step(
        self, user_step: Callable[..., Any], precision: StepContext, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step of the module in the context that ``precision`` makes."""
        with precision():
            return user_step(*args, **kwargs)


class LeftSharded(_NotRunning):
    """A run has ended, and this rank still stores the tensors of its stages."""

    def __init__(self, config: Config, stage_module: StageModule) -> None:
        self.stage_module = stage_module
        self.checkpoints = StageCheckpoints(config, stage_module)

    @property
    def runner(self) -> AtRest:
        """The object that runs the module's steps: raises."""
        return self.run


class Running:
    """The state from ``setup`` to ``teardown``; creating it is collective over all ranks.

    Attributes:
        stage_module: the part of the module on this rank.
        optimizers: the optimizers that are followed.
        runner: runs the module's steps.
        regrid: changes to shorter pipelines; None without ``regrid``.
        shards: this replica's part of the optimizer's state; None if the state is not sharded.
        checkpoints: saves and loads the module and its optimizers.
    """

    def __init__(
        self,
        config: Config,
        strategy: MPIStrategy,
        stage_module: StageModule,
        optimizers: Sequence[Optimizer],
        undo: ExitStack,
    ) -> None:
        self.stage_module, self.optimizers = stage_module, optimizers
        trainer, precision = stage_module.module.trainer, strategy.precision_plugin
        self.shards: OptimizerShards | None = None
        self._stepped: BucketwiseOptimizer | None = None
        move_optimizers(optimizers, stage_module.device)
        if config.shard_optimizer and optimizers:
            self.shards = self._shard_optimizer(optimizers[0], trainer, undo)
        strategy.setup_precision_plugin()
        self._adapt_trainer(trainer, undo)
        undo.enter_context(advising_where(lambda: strategy.is_distributed))
        self.runner: StepRunner | WholeStepRunner
        self.regrid: Regrid | None = None
        steps_in_parts = self.shards is not None
        if config.runs_pipeline:
            free = partial(free_bytes, stage_module.device, strategy.ranks_on_device)
            self.runner = runner = StepRunner(config, precision, free, steps_in_parts, stage_module)
            if config.regrid is not None and trainer.state.fn == TrainerFn.FITTING:
                self.regrid = Regrid(
                    config.regrid, stage_module, runner, free, self.unsharded_state
                )
        else:
            self.runner = WholeStepRunner(precision, steps_in_parts, stage_module)
        self.checkpoints = StageCheckpoints(config, stage_module, self.shards)
        undo.callback(self.runner.close)

    @property
    def run(self) -> Running:
        """This state."""
        return self

    def _shard_optimizer(
        self, optimizer: Optimizer, trainer: pl.Trainer, undo: ExitStack
    ) -> OptimizerShards:
        """Let each replica step its part of the parameters."""
        shared = self.stage_module.shared
        shards = OptimizerShards(optimizer, shared.replicas_of)
        if not (gradients_are_seen(trainer) or clearing_is_seen(trainer)):
            shared.divide(shards.part)
        self._stepped = BucketwiseOptimizer(optimizer, shards, shared.wait_for, stepping.BUCKET)
        undo.callback(self._stepped.remove)
        return shards

    def follow_changes(self) -> None:
        """Follow what hooks have changed of the module and its optimizers; alike on all ranks."""
        self.stage_module.follow_changes()
        self.optimizers = self.stage_module.module.trainer.optimizers
        if self._stepped is not None:
            self._stepped.follow(self.optimizers[0])

    def _adapt_trainer(self, trainer: pl.Trainer, undo: ExitStack) -> None:
        """Adapt the Trainer and its callbacks to ranks that have a part of the module."""
        stage_module, grid = self.stage_module, self.stage_module.grid
        if grid.world_size > 1:  # The ranks compare their positions in loops, and act together.
            undo.enter_context(LoopCheck(stage_module.groups).added_to(trainer))
            undo.enter_context(validating_together(trainer))
            undo.enter_context(acting_together(trainer))
        for average in weight_averages(trainer):
            stage_module.sharding.shard_copy(average)
            stage_module.weight_parts.split_copy(average)
        if not stage_module.has_all_stages:
            undo.enter_context(parameters_told_apart_by_identity())
        if grid.rank != grid.first_rank(grid.g_inter - 1):
            undo.enter_context(without_writing(trainer))
        if stage_module.groups.inter is not None:
            norms = GradientNorms(
                trainer, stage_module.remote_gradients, stage_module.follow_changes
            )
            undo.enter_context(norms.added_to(trainer))

    def unsharded_state(
        self, parameters: Sequence[nn.Parameter] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which each replica has the whole optimizer state; collective.

        Args:
            parameters: those whose state is gathered; None for all.
        """
        return nullcontext() if self.shards is None else self.shards.unsharded(parameters)

    def with_gathered_weights(self, masks: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Yield masks while their parameters, with optimizer state, are gathered; collective.

        If parameters or states are divided, the masks are yielded one at a time.
        """
        parts = self.stage_module.weight_parts
        if self.shards is None and not parts:
            yield masks
            return
        named = dict(self.stage_module.module.named_parameters(remove_duplicate=False))
        for name, mask in masks.items():
            with self.unsharded_state([named[name]]), parts.gathered([name], self.optimizers):
                yield {name: mask}

    def unshard_state(self) -> None:
        """Gather the optimizer's state on each replica, or drop it after an interruption."""
        if self.shards is None:
            return
        if self.stage_module.was_interrupted:
            self.shards.drop()
        else:
            self.shards.unshard()

    def after_draw(self) -> None:
        """Use the memory that pruning has freed."""
        self.runner.limit.measure_again()
        if self.regrid is not None:
            self.regrid.after_draw()
