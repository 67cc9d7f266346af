"""Lightning's hooks on a module whose layers are partitioned over the stages of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.checkpoint.atomic_io import clear_unfinished_checkpoints
from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.shard.partition import Partition, UnknownOrderError
from lightning_axosparse.pipeline.shard.sharded_module import (
    all_tensors,
    gather_tensors,
    is_left_sharded,
    mark_whole,
    parameters_on_meta,
)
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.sparse import densify
from lightning_axosparse.sparse.module.optimizer_state import dense_shapes
from lightning_axosparse.sparse.module.parameters import owned_parameters
from lightning_axosparse.strategy.compat.callbacks import graph_written
from lightning_axosparse.strategy.compat.internals import (
    callbacks_of,
    files_mapped,
    reading_files,
    trainer_of,
)
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.expert_parallel import SpreadExperts
from lightning_axosparse.strategy.launcher.launcher import MPILauncher
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from lightning_axosparse.strategy.regrid import Regridded
from lightning_axosparse.strategy.stages.checkpoints import load_whole_optimizer
from lightning_axosparse.strategy.stages.partitioner import Partitioner, starting_ticket
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.states import AtRest, LeftSharded, Running
from lightning_axosparse.strategy.validation import (
    advise_on_dropout,
    advise_on_norms,
    ignore_if_layers_follow,
    optimizers_before_setup,
    validate_copied_whole,
    validate_optimizers,
    validate_run,
)
from lightning_axosparse.support.deferred_init import DeferredInit
from lightning_axosparse.support.dense_products import onednn_is_faster, without_mkl
from lightning_axosparse.support.files import restoring
from lightning_axosparse.support.memory import free_bytes
from lightning_axosparse.support.remote_files import exists, local_copy, local_path
from lightning_axosparse.support.trace import clock, now
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:  # It loads DTensor, which only tensor parallelism needs.
    from lightning_axosparse.strategy.tensor_parallel import TensorShards


class PipelineStrategy(MPIStrategy):
    """A strategy whose ranks each compute some layers of the module, and store their tensors.

    Hooks depend on whether this rank has the full module or a part of it, which is one of
    :mod:`lightning_axosparse.strategy.states`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tensors: TensorShards | None = None
        self._state: AtRest | Running | LeftSharded = AtRest()
        self._keeps_sharded = False
        self.regridded: Regridded | None = None
        """The regrid of the last fit; None if there was none."""

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _layers(self) -> Partitioner:
        return Partitioner(self.config, self, self._module)

    # Before ranks are started

    def validate_fit(self, trainer: pl.Trainer) -> None:
        """Check that the module, its layers and the callbacks can run in a pipeline."""
        self._validate_run(trainer)
        # On the ranks, a batch of the loader may show the order of the layers.
        with ignore_if_layers_follow(self._module), suppress(UnknownOrderError):
            self._layers.partition()

    def _validate_run(self, trainer: pl.Trainer) -> None:
        """Check the arguments, the module and the callbacks, but not the layers."""
        self.connect(self._module)
        validate_run(self.config, trainer, self.checkpoint_io)
        if trainer.state.fn == TrainerFn.FITTING and self.launcher is not None:
            optimizers = optimizers_before_setup(self._module)
            validate_optimizers(self.config, optimizers, self.grid.g_data)

    # Construction: no rank has the full module

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init``, create parameters without memory until a checkpoint is loaded.

        ``load_from_checkpoint`` in the context maps the file, which is read when weights are used.
        """
        with super().tensor_init_context(empty_init):
            if not empty_init:
                yield
                return
            with files_mapped() as is_mapped, parameters_on_meta(is_mapped):
                yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Create the layers of ``configure_model`` only for this rank's stage.

        Their values are those of one process. With tensor parallelism all layers are created, as
        torch's plans split layers that exist.
        """
        layers = self._layers
        if self._tensors is not None:
            with self._tensors.configuring():
                yield
        elif layers.is_distributed:
            with DeferredInit() as deferred:
                yield
            # Each weight is sparsified before the next one is written.
            layers.sparsify_adopted(deferred.initialize)
            deferred.initialize_except(layers.split()[1].values())
        else:
            yield

    # From setup to teardown

    def setup_environment(self) -> None:
        """Connect this rank to the others, and prepare tensor parallelism."""
        if is_left_sharded(self._module):
            validate_copied_whole(callbacks_of(self._module.trainer))
        super().setup_environment()
        assert self._groups is not None
        self._tensors = None
        if self._groups.tensor is not None:
            if is_left_sharded(self._module):
                gather_tensors(self._module, all_tensors(self._module))
                mark_whole(self._module)
            # Imported here, because it loads DTensor.
            from lightning_axosparse.strategy.tensor_parallel import TensorShards

            densify(self._module)  # Torch's plans split dense weights.
            mesh = self._groups.device_mesh(self.root_device)
            self._tensors = TensorShards(self._module, mesh)
            self._undo.callback(self._tensors.end)

    def setup(self, trainer: pl.Trainer) -> None:
        """Configure the optimizers of the full module, then shard it over the stages."""
        assert self.accelerator is not None
        assert self._groups is not None
        self._state = AtRest()
        self._validate_run(trainer)
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self._module)
        if self._rank_count > 1:
            self._undo.enter_context(graph_written(trainer))
        self._choose_products()
        if self._tensors is not None:
            self._tensors.parallelize(self.config.tensors.plan)
        layers, optimizers = self._layers, list[Optimizer]()
        partition = layers.partition()
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains:
            if is_left_sharded(self._module) and starting_ticket(trainer) is None:
                densify(self._module)  # As after other runs, which leave it dense.
            self._configure_optimizers(trainer)
            if self._tensors is not None:
                advise_on_dropout(self._module)
            # Only in a fit: optimizers of an earlier one may belong to another module.
            optimizers = self.optimizers
        advise_on_norms(partition, self.config.microbatch_count, trains)
        self._log_start(partition, trainer)
        experts = None
        if self._groups.experts is not None:
            groups = self._groups.experts, self._groups.tensor
            experts = SpreadExperts(self._module, self.config.experts.experts, *groups)
        stage_module = StageModule(
            self.config,
            self._module,
            partition,
            self._groups,
            layers.stages,
            self.root_device,
            self._tensors,
            experts,
        )
        stage_module.shard(optimizers)
        self._undo.callback(self._end_run, stage_module)
        self._state = Running(self.config, self, stage_module, optimizers, self._undo)

    def _log_start(self, partition: Partition, trainer: pl.Trainer) -> None:
        """Log the grid, the partition and the free memory, in one line."""
        stages, shared, replicas = self.config.g_inter, self.config.tensors.ranks, self.grid.g_data
        if stages * shared * replicas == 1:
            return
        sizes = {"stages": stages, "tensor ranks": shared, "replicas": replicas}
        grid = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
        layers = f"{partition}; " if stages > 1 else ""
        free = free_bytes(self.root_device, self.ranks_on_device) / 1e9
        log = rank_zero_info if trainer.state.fn == TrainerFn.FITTING else rank_zero_debug
        log(f"{grid}: {layers}{free:,.1f} GB of memory free.")

    def _choose_products(self) -> None:
        """Replace large dense products and attention until teardown, if all ranks gain by it."""
        shapes = (parameter.shape for parameter in owned_parameters(self._module))
        faster = self.root_device.type == "cpu" and onednn_is_faster(shapes)
        if self.reduce_boolean_decision(faster):
            rank_zero_debug(
                "Large float32 products of matrices run by oneDNN, and attention runs in compiled "
                "loops. Both take less time than MKL on this processor. With "
                "torch.backends.mkldnn.enabled = False they run by MKL."
            )
            self._undo.enter_context(without_mkl())

    def _configure_optimizers(self, trainer: pl.Trainer) -> None:
        """Call ``configure_optimizers``, to which sparse weights show their dense shape."""
        if self.is_global_zero:
            clear_unfinished_checkpoints(trainer)
        self.regridded = None
        with dense_shapes(self._module) as configured:
            self.setup_optimizers(trainer)
            configured += self.optimizers
        validate_optimizers(self.config, self.optimizers, self.grid.g_data)

    def model_to_device(self) -> None:
        """Do nothing: sharding moves this rank's tensors."""

    def teardown(self) -> None:
        """Undo the changes of setup; under ``mpiexec`` the module stays sharded."""
        module = self.lightning_module
        if isinstance(self._state, Running):
            if not self._keeps_sharded:
                self._state.unshard_state()
            self._state = AtRest()
        if module is not None and is_left_sharded(module):
            # The run has ended before `shard`; Lightning would move the module to the CPU.
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module
        if isinstance(self._state, LeftSharded):
            self._state.stage_module.leave_sharded()

    def _end_run(self, stage_module: StageModule) -> None:
        """Leave the module sharded, or unshard it if this rank has all stages."""
        if self._keeps_sharded or not stage_module.has_all_stages:
            stage_module.end_run()
            self._state = LeftSharded(self.config, stage_module)
        else:
            stage_module.unshard()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the run, as a callback that refers to the Trainer may be pickled."""
        return {**super().__getstate__(), "_state": AtRest(), "_tensors": None}

    # Steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Regrid at the first batch of an epoch, once a ticket was drawn."""
        run = self._state.run
        if run.regrid is None or batch_idx > 0:
            return
        run.follow_changes()
        regridded = run.regrid.begin_epoch(self._module.trainer.current_epoch, self.optimizers)
        if regridded is not None:
            self.regridded, self._groups = regridded, run.stage_module.groups
            this_rank().set_grid(self.grid)

    def on_validation_start(self) -> None:
        """Evaluate with the first replica's buffers, which a checkpoint would have.

        Running statistics differ between replicas, as each gets its own batches. Lightning's ddp
        broadcasts them before every forward pass, but training does not read them.
        """
        self._state.run.stage_module.broadcast_buffers()

    def on_train_end(self) -> None:
        """Warn if ``regrid`` had no effect, because no ticket was drawn."""
        regrid = self._state.run.regrid
        if regrid is not None:
            regrid.warn_without_draw()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` forward and backward on every micro-batch of a batch."""
        context = self.step_context(self.precision_plugin.train_step_context)
        return self._state.runner.run_step(self._module.training_step, context, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` forward."""
        context = self.step_context(self.precision_plugin.val_step_context)
        return self._state.runner.run_step(self._module.validation_step, context, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` forward."""
        context = self.step_context(self.precision_plugin.test_step_context)
        return self._state.runner.run_step(self._module.test_step, context, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` forward; every stage returns the last stage's predictions."""
        context = self.step_context(self.precision_plugin.predict_step_context)
        return self._state.runner.run_step(self._module.predict_step, context, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer, and time the step without the closure."""
        if not isinstance(self._state, Running):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if optimizer not in self._state.optimizers:  # A hook has put it in the place of another.
            self._state.follow_changes()
        stage_module, closed = self._state.stage_module, now()

        def timed_closure() -> Any:
            nonlocal closed
            result = closure()
            stage_module.remote_gradients.forget_norms()
            closed = now()
            return result

        result = super().optimizer_step(optimizer, timed_closure, model, **kwargs)
        clock.add("optimizer", closed, now(), stage_module.grid.stage)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Omit the all-reduce of gradients while Lightning accumulates them."""
        with self._state.run.stage_module.shared.without_reduction():
            yield

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full module's state on the first rank; collective.

        Larger tensors are deferred until :meth:`save_checkpoint` writes them, unless a hook reads
        the checkpoint before.
        """
        checkpoints = self._state.checkpoints
        return self._module.state_dict() if checkpoints is None else checkpoints.model_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer's state on the first rank; collective.

        Larger tensors are deferred, as in :meth:`lightning_module_state_dict`.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        checkpoints = self._state.checkpoints
        if checkpoints is None:
            return optimizer.state_dict()
        return checkpoints.optimizer_state(optimizer, super().optimizer_state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; collective over the stages of the first replica.

        A process whose ranks have failed writes nothing, as it does not have their weights. One
        whose ranks have ended has no state of their optimizers, and says so.
        """
        checkpoints = self._state.checkpoints
        if isinstance(self._launcher, MPILauncher) and self._launcher.ranks_failed:
            rank_zero_warn(
                f"'{filepath}' was not written by the process that has started the ranks: they "
                "have failed, and here the module has the weights from before. If all fail at the "
                "same point, they write it themselves." + see("files")
            )
        elif checkpoints is None:
            if checkpoint.get("global_step") and checkpoint.get("optimizer_states") == []:
                rank_zero_warn(
                    f"'{filepath}' gets no states of optimizers and schedulers, which were on the "
                    "ranks of `fit`: a run that resumes from it starts them anew. ModelCheckpoint, "
                    "or `trainer.save_checkpoint` in `on_train_end`, saves them; with "
                    "weights_only=True none are expected." + see("files")
                )
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            checkpoints.save(checkpoint, filepath, storage_options, self.checkpoint_io)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; collective over all ranks when a run starts.

        Tensors of a file or folder are mapped into memory then, and read where a stage or a hook
        uses them. Those that are not local are copied to each node once.
        """
        files = reading_files(self.checkpoint_io)
        if not (self._is_starting and files is not None and exists(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, weights_only)
        with self._on_node(checkpoint_path) as local:
            if self.local_rank == 0:
                files.verify(local)
            self.barrier()
            return files.load_mapped(local, weights_only)

    @contextmanager
    def _on_node(self, path: Any) -> Iterator[Path]:
        """Yield the local path of a file or folder, or that of this node's copy; collective."""
        local = local_path(path)
        if local is not None:
            yield local
            return
        with local_copy(path) if self.local_rank == 0 else nullcontext() as own:
            of_ranks = all_gather((self.node_rank, own), self.world_group)
            yield next(copy for node, copy in of_ranks if node == self.node_rank and copy)
            self.barrier()

    @property
    def _is_starting(self) -> bool:
        """Whether the Trainer prepares a run, on all ranks."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        runs = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        return runs and not isinstance(self._state, Running)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a full module's state, after removing the same channels."""
        ticket = ChannelTicket.in_checkpoint(checkpoint)
        if ticket is not None:
            ticket.apply(self._module)
        with self._explained_sizes():
            if isinstance(self._state, Running):
                self._state.checkpoints.load_model(checkpoint["state_dict"], strict)
            else:
                self._layers.load(checkpoint["state_dict"], strict)

    @contextmanager
    def _explained_sizes(self) -> Iterator[None]:
        """Explain why sizes differ if channels of the module have been removed."""
        try:
            yield
        except RuntimeError as error:
            tickets = (getattr(each, "ticket", None) for each in callbacks_of(self._module.trainer))
            if not any(isinstance(each, ChannelTicket) for each in tickets):
                raise
            raise MisconfigurationException(
                "The checkpoint does not fit the module, of which channels have been removed: it "
                "may be from before that. Load it into a new module, with all channels, by a "
                "Trainer with a new callback." + see("channels")
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the whole states of the optimizers."""
        # A checkpoint may have no states of optimizers, as with Lightning's strategies.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            with restoring("the optimizers"):
                if isinstance(self._state, Running):
                    self._state.checkpoints.load_optimizer(optimizer, state)
                else:
                    load_whole_optimizer(optimizer, state, self.root_device)
