"""Trains a LightningModule in a pipeline of stages and in replicas: the Lightning strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import time
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.checkpoint.atomic_io import (
    AtomicCheckpointIO,
    clear_unfinished_checkpoints,
    local_path,
    validated,
)
from lightning_axosparse.checkpoint.folder_writer import FolderWriter
from lightning_axosparse.checkpoint.gather import (
    gather_model_state,
    gather_optimizer_state,
    gather_remote_tensors,
    local_model_state,
    local_optimizer_state,
)
from lightning_axosparse.checkpoint.stage_tensors import StageTensors
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.batch_norms import fewest_samples
from lightning_axosparse.pipeline.call_order import called_in_order, order_of_example
from lightning_axosparse.pipeline.checkpointing import ActivationCheckpointing
from lightning_axosparse.pipeline.in_flight import InFlightRule
from lightning_axosparse.pipeline.loss_weights import (
    LossRule,
    MicrobatchLoss,
    MicrobatchWeight,
)
from lightning_axosparse.pipeline.partition import (
    UNPARTITIONED,
    Partition,
    UnknownOrderError,
    partition_layers,
)
from lightning_axosparse.pipeline.profile import profile_example, validate_example_input
from lightning_axosparse.pipeline.schedule import SCHEDULES, WeightGradients
from lightning_axosparse.pipeline.schedule_choice import ScheduleRule
from lightning_axosparse.pipeline.sharding import Sharding
from lightning_axosparse.planning.grid_comparison import default_microbatches
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.materialize import Policy
from lightning_axosparse.sparse.optimizer_state import dense_shapes, restore_masters
from lightning_axosparse.sparse.parameters import sparse_parameters
from lightning_axosparse.sparse.ways import AUTO, Ways
from lightning_axosparse.strategy.auto_grid import choose_grid
from lightning_axosparse.strategy.batch_splitting import BatchSplitter
from lightning_axosparse.strategy.construction import (
    allocate,
    made_without,
    parameters_on_meta,
    validate_values,
    values_held,
)
from lightning_axosparse.strategy.launcher.launcher import MPILauncher
from lightning_axosparse.strategy.launcher.restarts import note_checkpoint
from lightning_axosparse.strategy.learning_rate import scaled_rates
from lightning_axosparse.strategy.lightning.checkpoint_io import (
    reading_files,
    writes_in_background,
)
from lightning_axosparse.strategy.lightning.device import move_optimizers
from lightning_axosparse.strategy.lightning.exceptions import JobEnd
from lightning_axosparse.strategy.lightning.finetuning import (
    parameters_told_apart_by_identity,
)
from lightning_axosparse.strategy.lightning.gradients import GradientNorms
from lightning_axosparse.strategy.lightning.hooks import (
    checkpoint_hooks,
    overrides,
    trainer_of,
)
from lightning_axosparse.strategy.lightning.loaders import first_step
from lightning_axosparse.strategy.lightning.loading import files_mapped
from lightning_axosparse.strategy.lightning.loop_check import LoopCheck
from lightning_axosparse.strategy.lightning.prediction_writers import without_writing
from lightning_axosparse.strategy.lightning.signals import acting_together
from lightning_axosparse.strategy.lightning.throughput import count_replicas
from lightning_axosparse.strategy.lightning.timed_validation import validating_together
from lightning_axosparse.strategy.lightning.weight_averages import weight_averages
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from lightning_axosparse.strategy.offload import OptimizerOffload, validate_bucketwise_optimizers
from lightning_axosparse.strategy.regrid.regrid import Regrid, Regridded
from lightning_axosparse.strategy.sharded_module import in_parts, is_left_sharded, summoned
from lightning_axosparse.strategy.stage_module import StageModule
from lightning_axosparse.strategy.train_step import StepRunner
from lightning_axosparse.strategy.validation import (
    advise_on_batch_norm,
    optimizers_before_setup,
    unless_made_later,
    validate_arguments,
    validate_callbacks,
    validate_copied_whole,
    validate_default_checkpoint_io,
    validate_layers_exist,
    validate_local,
    validate_module,
    validate_one_optimizer,
    validate_optimizers,
    validate_regrid_module,
    validate_regrid_stages,
    validate_split_module,
    validate_weight_gradients,
)
from lightning_axosparse.strategy.whole_step import WholeStepRunner
from lightning_axosparse.support.arguments import (
    BOOL,
    BYTES,
    COUNT,
    FUNCTION,
    INDEX,
    LAYERS,
    NAMES,
    NONE,
    TEXT,
    TIMEOUT,
    checked,
    instance_of,
    one_of,
)
from lightning_axosparse.support.available_memory import free_bytes
from lightning_axosparse.support.corrupt_file import restoring
from lightning_axosparse.support.deferred_tensor import all_made
from lightning_axosparse.support.torch_internals import tree_map_only
from lightning_axosparse.support.trace import clock
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class _Session:
    """What a strategy has only while the Trainer runs: from ``setup`` to ``teardown``.

    Attributes:
        stage_module: the part of the module on this rank.
        runner: runs the module's steps.
        offload: keeps the optimizer's state on the host; None if the device keeps it.
        regrid: moves to shorter pipelines; None if that was not asked for.
        tensors: those of a checkpoint, on the stages that have them.
        folders: writes them where checkpoints are folders.
    """

    stage_module: StageModule
    runner: StepRunner | WholeStepRunner
    offload: OptimizerOffload | None
    regrid: Regrid | None
    tensors: StageTensors
    folders: FolderWriter


@runtime_checkable
class PrunesByTicket(Protocol):
    """A callback that prunes the weights by a ticket when fit starts, if it has one then."""

    prunes_at_start: Literal[True]
    ticket: Ticket | None


class _Stored(NamedTuple):
    """What checkpoints are made of: the run's, or after it that of the module it left sharded."""

    stage_module: StageModule
    tensors: StageTensors
    folders: FolderWriter


class AxoSparseStrategy(MPIStrategy):
    """Inter-layer pipeline x data parallelism over MPI, with message-driven scheduling.

    The LightningModule does not change: every stage runs its ``training_step``, micro-batch by
    micro-batch, and computes only its own layers of one ``nn.Sequential`` or ``nn.ModuleList``. A
    stage runs whatever message has arrived (AxoNN, Singh & Bhatele, IPDPS 2022). Gradients are
    averaged over replicas as soon as they are final. Weights can go over to sparse storage while
    training (SAMO, Singh & Bhatele, IPDPS 2023): see ``EarlyBirdTicket``.

    ``python train.py`` with ``devices=N`` starts N ranks itself; under ``mpiexec`` or ``srun`` the
    script's own processes are the ranks. With one rank no MPI is started.

    Args:
        g_inter: stages per replica. The number of replicas follows: ``world_size // g_inter``.
            "auto" lets the planner choose before the ranks start, and prints why: by the time and
            memory of the module's layers on its ``example_input_array``, which should be like a
            micro-batch, and by the free memory. Without an example it takes the shortest balanced
            pipeline whose parameters, gradients and optimizer state (AdamW's, float32) fit.
        microbatches: micro-batches per batch and replica; None takes ``4 * g_inter`` (one without a
            pipeline), or so many that each has two samples, if the module has BatchNorms. A batch
            that they do not divide is split unevenly, with the right weights; a batch with fewer
            samples is split into one micro-batch per sample. Evaluation takes the closest number
            that divides the batch.
        pipeline: attribute path of the ``nn.Sequential`` or ``nn.ModuleList`` whose layers are
            partitioned over the stages, such as ``"model.transformer.h"``; or several of them, and
            of other modules that are a layer each, in the order in which a step calls them, such as
            ``["stem", "layer1", "layer2"]``. A list of lists counts as one list of all their
            layers. None takes the only candidate, or the layers of several in the order in which
            ``forward`` calls them with the module's ``example_input_array``, or else the step with
            a batch of the loader; neither computes or consumes anything.
        balance: "parameters" partitions the layers so that the largest stage is as small as
            possible, "time" so that the slowest stage is as fast as possible, timing the layers on
            the module's ``example_input_array``, which should be like a micro-batch; a sequence
            gives the number of layers of each stage.
        in_flight: most micro-batches that a stage may hold between forward and backward. None takes
            what memory allows after the first step, and again after a ticket was drawn: from
            ``g_inter``, which is what 1F1B holds, to ``2 * g_inter``, which hides jitter and
            latency. Losses and weights do not depend on it.
        schedule: "message-driven", or for comparison "1f1b", "gpipe" or "zb-h1".
        batch_norm: when BatchNorms, which normalize by the statistics of a micro-batch, update
            their running statistics: by each "micro-batch", as with gradient accumulation, or
            "deferred": once, by those of the whole batch, on data-parallel ranks that of all of
            them, as one process would.
        weight_gradients: "together" makes all gradients of a layer in its backward pass. "deferred"
            makes those of weights where the stage would wait for a message, so the previous stage
            gets its gradient earlier: for linear layers, Hugging Face's ``Conv1D`` and
            convolutions whose weights are dense, and in "message-driven" and "zb-h1". "cooldown"
            does so for the last ``2 * g_inter - 1`` micro-batches alone, in "message-driven".
            Gradients are the same to the bit, and complete before anything of Lightning reads them.
            None runs the first 24 batches, and as many after a draw, in all three ways, and keeps
            the fastest, for stages on CPUs that exchange messages and without ``recompute``;
            "deferred" for "zb-h1"; else "together".
        transport: "mpi" gives each stage a rank; "loopback" runs all stages of a replica in one
            process, through the same schedule, for notebooks, debuggers and tests.
        split_batch: splits a batch into micro-batches, ``(batch, microbatches) -> list``, such as
            ``lambda batch, n: list(zip(batch[0].chunk(n, 1), batch[1].chunk(n)))``. None finds the
            batch dimension of each tensor from the DataLoader, splits along it, and gives the rest
            to every micro-batch whole; the first batch prints which. Where the loader does not show
            the batch dimension, all first dimensions must agree.
        microbatch_loss: how the losses of the micro-batches make up the loss of the batch. "auto"
            follows how ``training_step`` reduces: means are weighted by their denominators
            (samples, or tokens that are not padding, or class weights), sums are added up; for a
            loss that does not combine it raises or warns. "mean" and "sum" always average or add
            up.
        microbatch_weight: weights for a loss whose reduction cannot be followed: a function of a
            micro-batch that returns the denominator of its loss, or the name of the batch entry
            that is counted: integers that are not -100, or the sum of a mask.
        check_first_batch: compares the first batch of each loader with its micro-batches: the loss,
            its gradient, and what the step logs and changes on the module. A loss that differs is
            an error, any other difference a warning. The step runs forward three times more for it,
            and leaves no trace.
        step_outputs: who gets what ``training_step``, ``validation_step`` and ``test_step`` return,
            in the hooks that end a batch: "last" the last stage alone (after a regrid, for the part
            of the batch that its replica computes), while the other stages get the loss and the
            logged values; "all" every rank, which sends it round in every step. ``predict`` returns
            the predictions on every rank in both cases.
        save_distributed_checkpoint: checkpoints are folders to which all stages write their own
            tensors at once, as those of Lightning's ``ModelParallelStrategy``. Every grid resumes
            from them, and ``python -m lightning_axosparse.checkpoint.consolidate`` makes the one
            file of them that is written otherwise, one tensor at a time. With Lightning's
            ``AsyncCheckpointIO`` all stages write in threads, while training goes on.
        recompute: activation checkpointing: every so many layers of a stage keep only their first
            input, and are computed again in the backward pass; "sqrt" takes the square root of the
            stage's layers (AxoNN). Gradients are the same to the bit.
        offload_optimizer: keeps the optimizer's state in host memory and steps there; the device
            keeps parameters and gradients. Parameters of less than 32 bits get float32 master
            weights.
        offload_bucket: elements that are copied to the host and stepped at a time.
        regrid: continues, from the epoch after the ticket was drawn, with shorter pipelines and
            more replicas: with this number of stages, a divisor of ``g_inter``; with "auto" as few
            as memory allows. Batches, their order and the losses stay the same.
        timeout: seconds, or a ``timedelta``, for which a rank waits for others at a time; after
            that every rank that can be reached prints where it is, and the job ends with the names
            of those that do not answer. It should be longer than what one rank may do while others
            wait for it: its first batch, a batch that comes late, a checkpoint.
        restarts: how many times at most ``fit`` begins again from the newest whole checkpoint that
            it has saved, or from its start, after a rank was killed, as when memory runs out. Only
            where the call starts the ranks; an exception of your code is never repeated.

    Raises:
        MisconfigurationException: for arguments out of range, here; for a grid, a module or an MPI
            that does not fit, before any rank is started.
    """

    strategy_name = "axosparse"
    learning_rate_factor: float = 1.0
    """What optimizer steps multiply the learning rates by; every run starts with 1."""

    @checked(
        MisconfigurationException,
        g_inter=COUNT | one_of("auto"),
        microbatches=COUNT | NONE,
        pipeline=TEXT | NAMES | NONE,
        balance=one_of("parameters", "time") | LAYERS,
        in_flight=COUNT | NONE,
        batch_norm=one_of("micro-batch", "deferred"),
        schedule=one_of(*SCHEDULES),
        weight_gradients=one_of(*get_args(WeightGradients)) | NONE,
        transport=one_of("mpi", "loopback"),
        split_batch=FUNCTION | NONE,
        microbatch_loss=one_of("auto", "mean", "sum"),
        microbatch_weight=FUNCTION | TEXT | NONE,
        check_first_batch=BOOL,
        step_outputs=one_of("last", "all"),
        save_distributed_checkpoint=BOOL,
        timeout=TIMEOUT,
        restarts=INDEX,
        recompute=COUNT | one_of("sqrt") | NONE,
        offload_optimizer=BOOL,
        offload_bucket=BYTES,
        regrid=COUNT | one_of("auto") | NONE,
        accelerator=instance_of("a Lightning Accelerator", Accelerator) | NONE,
        cluster_environment=instance_of("a ClusterEnvironment", ClusterEnvironment) | NONE,
        checkpoint_io=instance_of("a CheckpointIO", CheckpointIO) | NONE,
        precision_plugin=instance_of("a Precision plugin", Precision) | NONE,
    )
    def __init__(
        self,
        g_inter: int | Literal["auto"] = 1,
        microbatches: int | None = None,
        pipeline: str | Sequence[str] | None = None,
        balance: Literal["parameters", "time"] | Sequence[int] = "parameters",
        in_flight: int | None = None,
        schedule: Literal["message-driven", "1f1b", "gpipe", "zb-h1"] = "message-driven",
        weight_gradients: WeightGradients | None = None,
        batch_norm: Literal["micro-batch", "deferred"] = "micro-batch",
        transport: Literal["mpi", "loopback"] = "mpi",
        split_batch: Callable[[Any, int], list[Any]] | None = None,
        microbatch_loss: MicrobatchLoss = "auto",
        microbatch_weight: MicrobatchWeight | None = None,
        check_first_batch: bool = True,
        step_outputs: Literal["last", "all"] = "last",
        save_distributed_checkpoint: bool = False,
        recompute: int | Literal["sqrt"] | None = None,
        offload_optimizer: bool = False,
        offload_bucket: int = 4_000_000,
        regrid: int | Literal["auto"] | None = None,
        timeout: float | timedelta = timedelta(minutes=30),
        restarts: int = 0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        validate_arguments(g_inter, in_flight, schedule, transport, balance, regrid)
        validate_weight_gradients(weight_gradients, schedule, recompute)
        super().__init__(
            g_inter if transport == "mpi" and g_inter != "auto" else 1,
            timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout),
            restarts,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )
        self._chooses_grid = g_inter == "auto"
        self.g_inter = 1 if g_inter == "auto" else g_inter
        self.schedule = schedule
        self._weight_gradients = weight_gradients
        self._defers_norms = batch_norm == "deferred"
        self.transport = transport
        self._microbatches, self._in_flight = microbatches, in_flight
        self._pipeline, self._balance = pipeline, balance
        self._split_batch, self._recompute = split_batch, recompute
        self._loss_rule = LossRule(microbatch_loss, microbatch_weight)
        self._check_first_batch = check_first_batch
        self._step_outputs = step_outputs
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._offload_bucket = offload_bucket if offload_optimizer else None
        self._regrid = regrid
        self.regridded: Regridded | None = None
        """The move to shorter pipelines in the last fit, if there was one."""
        self._session: _Session | None = None
        self._keeps_sharded = False
        self._ended: _Stored | None = None

    @property
    def microbatches(self) -> int:
        """Micro-batches per batch and replica."""
        return self._microbatches or default_microbatches(self.g_inter)

    @property
    def _pipelines(self) -> bool:
        """Whether there are stages or micro-batches, or layers that are computed again."""
        split = self.g_inter > 1 or self.microbatches > 1 or self._defers_norms
        return split or self._recompute is not None or self._schedules.defers

    @property
    def _schedules(self) -> ScheduleRule:
        """How the training schedule is chosen."""
        may_defer = (
            self.g_inter > 1
            and self._recompute is None
            and self.transport == "mpi"
            and self.root_device.type == "cpu"
            and not overrides(self._module, "backward")
        )
        return ScheduleRule(self.schedule, self._weight_gradients, may_defer)

    # Validation, before any rank is started

    def validate_fit(self, trainer: pl.Trainer) -> None:
        """Check that the module, its layers and the callbacks can run in a pipeline.

        Raises:
            MisconfigurationException: for a module or callback that cannot.
        """
        self._validate_run(trainer)
        # The ranks have loaders, whose batches show the order of the layers.
        with unless_made_later(self._module), suppress(UnknownOrderError):
            self._partition_layers()

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module, and choose the number of stages if it is "auto"."""
        if self._chooses_grid:
            self._choose_grid(model)
            self._chooses_grid = False
        super().connect(model)

    def _choose_grid(self, model: pl.LightningModule) -> None:
        if self._ranks > 1:
            validate_layers_exist(model)
            decision = choose_grid(
                self,
                model,
                self._pipeline,
                self._microbatches,
                self._in_flight,
                self._recompute is not None,
                "time" if self._balance == "time" else "parameters",
            )
            self.g_inter = self._ranks_per_replica = decision.g_inter
            rank_zero_info(str(decision))

    def _validate_run(self, trainer: pl.Trainer) -> None:
        """Check what does not depend on the layers."""
        self.connect(self._module)
        if trainer.state.fn == TrainerFn.FITTING:
            if self._pipelines:
                validate_module(self._module)
            if self._schedules.defers:
                validate_split_module(self._module)
            if self.launcher is not None:
                self._validate_optimizers(optimizers_before_setup(self._module))
        if self.g_inter > 1:
            validate_callbacks(trainer.callbacks, self.transport)  # type: ignore[attr-defined]
        validate_regrid_stages(self._regrid, self.g_inter)
        if self._save_distributed_checkpoint:
            validate_default_checkpoint_io(self.checkpoint_io)

    def _validate_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        validate_optimizers(optimizers, self._pipelines, self.grid.g_data)
        if self._offload_bucket is not None:
            validate_one_optimizer(optimizers, "offload_optimizer")
            for optimizer in optimizers:
                validate_bucketwise_optimizers(optimizer)

    # Construction: no rank has the whole model

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init``, make parameters without memory, until a checkpoint is loaded.

        ``load_from_checkpoint`` in the context maps the file, which is read where weights are used.
        """
        with super().tensor_init_context(empty_init):
            if not empty_init:
                yield
                return
            with files_mapped() as is_mapped, parameters_on_meta(is_mapped):
                yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Make what ``configure_model`` makes for this rank's stage alone, as one process would."""
        if len(self._stages) == self.g_inter or self._measures_layers:
            yield
            return
        with made_without(self._tensors_of_others, self._make_sparse):
            yield

    def _tensors_of_others(self) -> Iterable[Tensor]:
        """What the module would have on other stages' ranks alone."""
        return self._sharding().split(self._stages)[1].values()

    def _make_sparse(self, make: Callable[[Tensor], None]) -> None:
        """Store sparse, each as soon as it is made, what an adopted ticket prunes of this stage."""
        ticket = self._adopted
        if ticket is None:
            return
        kept, _ = self._sharding().split(self._stages)
        for name, mask in ticket.part(kept).items():
            if mask.shape == kept[name].shape and self._keeps_dtype(kept[name].dtype):
                make(kept[name])
                sparsify(self._module, {name: mask})

    @property
    def _adopted(self) -> Ticket | None:
        """The ticket that a callback has before the layers are made in ``configure_model``."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        if not overrides(self._module, "configure_model"):
            return None
        callbacks = vars(trainer)["callbacks"]
        pruning = (each for each in callbacks if isinstance(each, PrunesByTicket))
        return next((each.ticket for each in pruning if each.ticket is not None), None)

    def _keeps_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the precision leaves parameters of this dtype as they are."""
        probe = nn.ParameterList([torch.empty(0, dtype=dtype)])
        return next(self.precision_plugin.convert_module(probe).parameters()).dtype == dtype

    @property
    def _stages(self) -> range:
        """The stages of this rank."""
        stage = self.grid.stage
        return range(self.g_inter) if self.transport == "loopback" else range(stage, stage + 1)

    @property
    def _measures_layers(self) -> bool:
        """Whether the stages are known only when all layers have run."""
        return self.g_inter > 1 and self._balance == "time"

    def _sharding(self) -> Sharding:
        """Which stages keep which tensors of the module, before it is sharded."""
        partition = self._partition_layers()
        return Sharding(self._module, partition.names, partition.parts)

    # Setup and teardown

    def setup_environment(self) -> None:
        """Connect this rank to the others, if the module is in a state in which callbacks copy it.

        Raises:
            MisconfigurationException: for averages of a module that a run has left sharded.
        """
        if is_left_sharded(self._module):
            validate_copied_whole(self._module.trainer.callbacks)  # type: ignore[attr-defined]
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module over the stages, after its optimizers were configured for all of it."""
        assert self.accelerator is not None
        self._ended = None
        self._validate_run(trainer)
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self._module)
        partition = self._partition_layers()
        self._configure_optimizers(trainer)
        partition = self._balance_by_time(partition)
        if trainer.state.fn == TrainerFn.FITTING:
            advise_on_batch_norm(self._module, self.microbatches, self._defers_norms)
        # Those of an earlier fit may belong to another module.
        optimizers = self.optimizers if trainer.state.fn == TrainerFn.FITTING else []
        stage_module = self._shard_module(partition, optimizers)
        offload = self._place_optimizers(stage_module, optimizers)
        self.setup_precision_plugin()
        self._check_loops(trainer)
        count_replicas(trainer, self.grid.data_size)
        for average in weight_averages(trainer):
            stage_module.sharding.shard_copy(average)
        if not stage_module.is_whole:
            self._undo.enter_context(parameters_told_apart_by_identity())
        if self.grid.rank != self.grid.same_batch_ranks[0]:
            self._undo.enter_context(without_writing(trainer))
        if stage_module.groups.inter is not None:
            norms = GradientNorms(trainer, stage_module.remote_gradients)
            self._undo.enter_context(norms.added_to(trainer))
        tensors = _tensors_of(stage_module)
        folders = FolderWriter(tensors, writes_in_background(self.checkpoint_io))
        self._undo.callback(folders.wait)
        steps_in_parts = offload is not None
        if self._pipelines:
            rule = self._in_flight_rule(trainer)
            runner = self._start_pipeline(trainer, stage_module, rule, steps_in_parts)
            regrid = self._plan_regrid(trainer, partition, stage_module, runner, rule)
            self._session = _Session(stage_module, runner, offload, regrid, tensors, folders)
        else:
            whole = WholeStepRunner(trainer, self.precision_plugin, steps_in_parts, stage_module)
            self._undo.callback(whole.close)
            self._session = _Session(stage_module, whole, offload, None, tensors, folders)
        self.learning_rate_factor = 1.0

    def teardown(self) -> None:
        """Undo what setup changed; under ``mpiexec`` the module stays sharded."""
        module, self._session = self.lightning_module, None
        if module is not None and is_left_sharded(module):
            # This run has ended before it took the module, which Lightning moves to the CPU.
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module
        if self._ended is not None:
            self._ended.stage_module.leave_sharded()

    def model_to_device(self) -> None:
        """Do nothing: sharding moves what this rank keeps."""

    def _partition_layers(self) -> Partition:
        """Partition the module's layers over the stages, by parameters."""
        module = self._module
        partition = UNPARTITIONED
        if self.g_inter > 1 or self._recompute is not None:
            sizes = None if isinstance(self._balance, str) else self._balance
            # Of layers on other ranks only the dense shapes are known.
            in_part = is_left_sharded(module) or self._adopted is not None
            with dense_shapes(module) if in_part else nullcontext():
                partition = partition_layers(
                    module, self._pipeline, sizes, self.g_inter, self._call_order
                )
        if self._measures_layers:
            validate_example_input(module)
        if self._regrid is not None:
            validate_regrid_module(module)
        return partition

    def _call_order(self, module: nn.Module, layers: Mapping[str, str]) -> list[str]:
        """The order in which the module's example or else a first step calls layers; collective."""
        order = order_of_example(module, layers)
        if order or self._trainer is None:
            return order
        step = first_step(self._trainer)
        if step is not None:
            step = step._replace(context=self.precision_plugin.forward_context)
            order = called_in_order(module, layers, step)
        return self.broadcast(order)

    def _configure_optimizers(self, trainer: pl.Trainer) -> None:
        """For a fit, call ``configure_optimizers``; sparse weights show it their dense shape."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.is_global_zero:
            clear_unfinished_checkpoints(trainer)
        self.regridded = None
        with dense_shapes(self._module) as made:
            self.setup_optimizers(trainer)
            made += self.optimizers
        self._validate_optimizers(self.optimizers)

    def _balance_by_time(self, partition: Partition) -> Partition:
        """Partition again by the times that the first rank measures, if ``balance="time"``."""
        if self.g_inter == 1:
            return partition
        if self._measures_layers:
            seconds: list[float] = []
            with self.summon_full_params():
                if self.global_rank == 0:
                    arguments = partition, self.precision_plugin, self.root_device
                    layers = profile_example(self._module, *arguments)
                    seconds = [layer.seconds for layer in layers]
            partition = partition.by_time(self.broadcast(seconds))
        rank_zero_info(str(partition))
        return partition

    def _shard_module(self, partition: Partition, optimizers: Sequence[Optimizer]) -> StageModule:
        """Drop the tensors of other ranks' stages, until the run ends."""
        assert self._groups is not None
        recompute = None
        if self._recompute is not None:
            recompute = ActivationCheckpointing(self._recompute, self.root_device)
        stage_module = StageModule(
            self._module,
            partition,
            self._groups,
            self._stages,
            self.root_device,
            recompute,
            self._schedules.splits_backward,
            self._defers_norms,
        )
        stage_module.bring()
        kept, _ = stage_module.sharding.split(self._stages)
        validate_values(kept.items(), self.grid.stage)
        stage_module.shard(optimizers)
        self._undo.callback(self._end_run, stage_module)
        return stage_module

    def _end_run(self, stage_module: StageModule) -> None:
        """Leave the module sharded, or whole where this rank has all of it."""
        if self._keeps_sharded or not stage_module.is_whole:
            stage_module.end_run()
            tensors = _tensors_of(stage_module)
            self._ended = _Stored(stage_module, tensors, FolderWriter(tensors))
        else:
            stage_module.unshard()

    @contextmanager
    def summon_full_params(self, rank0_only: bool = True) -> Iterator[None]:
        """Bring the module together that a run under ``mpiexec`` or ``srun`` has left sharded.

        Inside the context ``state_dict`` and the parameters are those of the whole module; what is
        stored sparse stays so. Changes of other ranks' layers are lost when it ends. Collective
        over all ranks, a tensor at a time. Where the module is whole it does nothing.

        Args:
            rank0_only: only the first rank gets the module; else every rank does.

        Raises:
            RuntimeError: during a run; use ``trainer.save_checkpoint`` there.
        """
        if self._session is not None:
            raise RuntimeError(
                "summon_full_params() was called during a run. Call it when `fit`, `validate`, "
                "`test` or `predict` has returned; in hooks save with `trainer.save_checkpoint`."
                + see("values-between-layers")
            )
        if is_left_sharded(self._module):
            with summoned(self._module, self.is_global_zero or not rank0_only):
                yield
        else:
            yield

    def keep_sharded(self) -> None:
        """Leave the module sharded when a run ends; the launcher calls this on each rank."""
        self._keeps_sharded = True

    def release_shard(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank returns to the caller of the launcher, and free it."""
        if self._ended is None:
            return
        yield from self._ended.stage_module.release()
        self._ended = None

    def _place_optimizers(
        self, stage_module: StageModule, optimizers: Sequence[Optimizer]
    ) -> OptimizerOffload | None:
        """Move the optimizers' state to the device, or offload it to the host."""
        if self._offload_bucket is None:
            move_optimizers(optimizers, self.root_device)
        elif optimizers:
            offload = OptimizerOffload(
                optimizers[0],
                self._offload_bucket,
                self.root_device,
                stage_module.await_gradients,
            )
            self._undo.callback(offload.remove)
            return offload
        return None

    def _check_loops(self, trainer: pl.Trainer) -> None:
        """Let the ranks compare their positions in the Trainer's loops, and act together."""
        assert self._groups is not None
        if self.grid.world_size > 1:
            self._undo.enter_context(LoopCheck(self._groups).added_to(trainer))
            self._undo.enter_context(JobEnd().added_to(trainer))
            self._undo.enter_context(validating_together(trainer))
            self._undo.enter_context(acting_together(trainer))

    def _in_flight_rule(self, trainer: pl.Trainer) -> InFlightRule:
        free = partial(free_bytes, self.root_device, self.ranks_on_device)
        return InFlightRule(
            self._in_flight, self.schedule, self.root_device, free, lambda: trainer.global_step
        )

    def _start_pipeline(
        self,
        trainer: pl.Trainer,
        stage_module: StageModule,
        rule: InFlightRule,
        steps_in_parts: bool,
    ) -> StepRunner:
        fewest = fewest_samples(self._module) if self._microbatches is None else 1
        runner = StepRunner(
            trainer,
            self.precision_plugin,
            self._schedules,
            BatchSplitter(trainer, self.microbatches, self._split_batch, fewest),
            self._loss_rule,
            self._check_first_batch,
            rule.free,
            self._step_outputs == "all",
            steps_in_parts,
            stage_module,
            rule.limit(self.g_inter, stage_module.groups),
        )
        self._undo.callback(runner.close)
        return runner

    # Regrid

    def _plan_regrid(
        self,
        trainer: pl.Trainer,
        partition: Partition,
        stage_module: StageModule,
        runner: StepRunner,
        rule: InFlightRule,
    ) -> Regrid | None:
        if self._regrid is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        return Regrid(self._regrid, partition, stage_module, runner, rule, self.microbatches)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Move to shorter pipelines at the first batch of an epoch, once a ticket was drawn."""
        regrid = self._running.regrid
        if regrid is None or batch_idx > 0:
            return
        self._running.folders.wait()  # of the stages of the grid before
        regridded = regrid.begin_epoch(self._module.trainer.current_epoch, self.optimizers)
        if regridded is not None:
            self.regridded, self._groups = regridded, self._running.stage_module.groups
            this_rank().place_in(self.grid)

    def on_validation_start(self) -> None:
        """Evaluate the model that a checkpoint would hold: that with the first replica's buffers.

        Running statistics differ between replicas, as each sees its own batches. Lightning's ddp
        broadcasts them before every forward pass; training does not read them.
        """
        self._running.stage_module.broadcast_buffers()

    def on_train_end(self) -> None:
        """Warn if ``regrid`` had no effect, because no ticket was drawn."""
        if self._running.regrid is not None:
            self._running.regrid.warn_without_draw()

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` forward and backward on every micro-batch of a batch."""
        if self._is_at_rest:
            return super().training_step(*args, **kwargs)
        return self._running.runner.train(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` forward."""
        if self._is_at_rest:
            return super().validation_step(*args, **kwargs)
        context = self.precision_plugin.val_step_context
        return self._running.runner.evaluate(self._module.validation_step, context, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` forward."""
        if self._is_at_rest:
            return super().test_step(*args, **kwargs)
        context = self.precision_plugin.test_step_context
        return self._running.runner.evaluate(self._module.test_step, context, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` forward; every stage returns the last stage's predictions."""
        if self._is_at_rest:
            return super().predict_step(*args, **kwargs)
        context = self.precision_plugin.predict_step_context
        return self._running.runner.evaluate(self._module.predict_step, context, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer with its scaled rates, and time the step without the closure."""
        if self._is_at_rest:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        closed = time()

        def timed_closure() -> Any:
            nonlocal closed
            result = closure()
            self._running.stage_module.remote_gradients.forget_norms()
            closed = time()
            return result

        with scaled_rates(optimizer, self.learning_rate_factor):
            result = super().optimizer_step(optimizer, timed_closure, model, **kwargs)
        clock.add("optimizer", closed, time(), self.grid.stage)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do without the all-reduce of gradients while Lightning accumulates them."""
        with self._running.stage_module.gradients_kept_local():
            yield

    @property
    def has_step_outputs(self) -> bool:
        """Whether this rank gets what the steps return, and not their loss alone."""
        return self._step_outputs == "all" or self._running.stage_module.runs_last_stage

    # Sparse storage

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients that this rank all-reduced in its last step."""
        reducer = self._running.stage_module.reducer
        return 0 if reducer is None else reducer.reduced_bytes

    @property
    def in_flight(self) -> int:
        """Most micro-batches that a stage may hold, as of the last training batch."""
        return self._running.runner.limit.value

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Most micro-batches that each stage of this rank held in its last training batch."""
        return self._running.runner.peak_in_flight

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank keeps, by name, in the module's order."""
        return self._stored.stage_module.sharding.held()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the whole model, by name, one at a time, for hooks.

        Use it in place of ``named_parameters()`` where values of all stages are needed, as for
        histograms. Every rank of a pipeline has to iterate, to the end.

        Yields:
            The name and the parameter, or a copy of that of another stage, with its ``grad``. A
            weight that is stored sparse is the vector of its kept values.
        """
        yield from self._running.stage_module.whole_parameters()

    def counted_parameters(self) -> set[str]:
        """The names of those that this rank counts: each is counted once over a pipeline."""
        return self._stored.stage_module.sharding.counted()

    def parameter_stages(self) -> dict[str, frozenset[int]]:
        """The stages that keep each parameter of the whole model, by name."""
        return dict(self._stored.stage_module.sharding.holders)

    def sparsify(
        self,
        masks: Mapping[str, Tensor],
        policy: Policy = "sparse",
        ways: Ways = AUTO,
    ) -> None:
        """Store the masked parameters of this rank, and their optimizer state, sparse.

        Args:
            masks: name of a parameter of this rank -> bool tensor of its shape, True where an
                entry is kept. Read one at a time.
            policy: as for :func:`lightning_axosparse.sparsify`.
            ways: how their products run, the same on all ranks.
        """
        optimizer = self.optimizers[0] if self.optimizers else None
        sparsify(self._module, masks, optimizer, policy=policy, compute=ways.compute)
        stored = sparse_parameters(self._module).values()
        for entry in stored:
            assert entry.form is not None
            entry.form.ways = ways
        if optimizer is not None:
            restore_masters(optimizer, stored)

    def shrink(self, ticket: ChannelTicket) -> None:
        """Remove pruned channels from the layers of this rank, and from their optimizer state.

        Args:
            ticket: the same on all ranks; layers that it has shrunk already do not change.
        """
        ticket.apply(self._module, self.optimizers)
        self._running.stage_module.remote_gradients.follow()
        self.use_freed_memory()

    def use_freed_memory(self) -> None:
        """Choose in-flight limit, schedule and grid again, as the last pruning has freed memory."""
        self._running.runner.measure_again()
        if self._running.regrid is not None:
            self._running.regrid.after_draw()

    # Checkpoints: dense, as one process writes them, in one file or in one of each stage

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on the first rank, an empty dict on others; collective.

        Larger tensors are deferred until :meth:`save_checkpoint` writes them, unless a hook reads
        the checkpoint before.
        """
        if self._is_at_rest:
            return self._module.state_dict()
        if self.grid.data_rank > 0:
            return {}
        if self._is_ordinary:
            return super().lightning_module_state_dict()
        stage_module, tensors, _ = self._stored
        shared = self._session.runner.metric_states_shared() if self._session else nullcontext()
        with shared, in_parts(self._module):
            if self.grid.replica > 0:
                return {}
            for average in weight_averages(self._module.trainer):
                stage_module.share_outer_buffers(average)
            return self._for_hooks(
                gather_model_state(stage_module.sharding, stage_module.stages, tensors)
            )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; collective over the stages of the first replica.

        A process whose ranks have failed writes nothing, as what they trained is not there.
        """
        if isinstance(self._launcher, MPILauncher) and self._launcher.ranks_failed:
            rank_zero_warn(
                f"'{filepath}' was not written by the process that has started the ranks: they "
                "have failed, and here the module has the weights from before. If all fail at the "
                "same point, they write it themselves." + see("files")
            )
        elif self._is_at_rest:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.grid.replica == 0:
            assert self._trainer is not None
            note_checkpoint(filepath, checkpoint, self._trainer)
            tensors = self._stored.tensors
            checkpoint = gather_remote_tensors(checkpoint, tensors)
            if self._save_distributed_checkpoint:
                self._stored.folders.save(checkpoint, validate_local(filepath, storage_options))
            elif tensors.is_first:
                if not isinstance(self.checkpoint_io, AtomicCheckpointIO):
                    checkpoint = all_made(checkpoint)
                super().save_checkpoint(checkpoint, filepath, storage_options)
                tensors.end()
            else:
                tensors.serve()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but not before the one that may take its place is written."""
        remove = partial(super().remove_checkpoint, filepath)
        if self._session is None:
            remove()
        else:
            self._session.folders.when_written(remove)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; collective over the job when a run starts.

        Tensors of a local file or folder are deferred then, until a stage needs them, or mapped
        into memory where a hook reads the checkpoint.
        """
        files, local = reading_files(self.checkpoint_io), local_path(checkpoint_path)
        if not (self._is_starting and files is not None and local is not None and local.exists()):
            return super().load_checkpoint(checkpoint_path, weights_only)
        if self.local_rank == 0:
            files.verify(local)
        self.barrier()
        checkpoint = validated(files.load_deferred(local, weights_only), local, self._module)
        is_part, trainer = len(self._stages) < self.g_inter, self._module.trainer
        is_read = checkpoint_hooks(trainer, "on_load_checkpoint") or weight_averages(trainer)
        if is_part and not is_read:
            return checkpoint
        whole: dict[str, Any] = all_made(checkpoint)
        return whole

    def _for_hooks(self, state: dict[str, Any]) -> dict[str, Any]:
        """A part of a checkpoint, whole on the first rank if a hook of the user reads it."""
        if not checkpoint_hooks(self._module.trainer, "on_save_checkpoint"):
            return state
        tensors = self._stored.tensors
        if not tensors.is_first:
            tensors.serve()
            return state
        state = all_made(state)
        tensors.end()
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a whole module's state, after removing the same channels."""
        ticket = ChannelTicket.in_checkpoint(checkpoint)
        if ticket is not None:
            ticket.apply(self._module)
        state, others = checkpoint["state_dict"], dict[str, Tensor]()
        if self._session is not None and not self._is_ordinary:
            stage_module = self._session.stage_module
            state = local_model_state(state, stage_module.sharding, stage_module.stages)
            strict = False
        else:
            kept, others = self._sharding().split(self._stages)
            allocate(kept.values())
        if self._measures_layers:
            others = {}
        with in_parts(self._module):
            held = values_held(state, self._module, others.values())
        # A sparse layer makes its weight dense when its turn has come.
        stored = sparse_parameters(self._module)
        made = {n: value if n in stored else all_made(value) for n, value in held.items()}
        self._module.load_state_dict(made, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state on the first rank, an empty dict on others; collective.

        Larger tensors are deferred, as in :meth:`lightning_module_state_dict`.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._is_at_rest:
            return optimizer.state_dict()
        if self.grid.replica > 0:
            return {}
        if self._is_ordinary:
            return super().optimizer_state(optimizer)
        stage_module, tensors, _ = self._stored
        return self._for_hooks(
            gather_optimizer_state(
                optimizer,
                stage_module.group_names(optimizer),
                stage_module.sharding.held(),
                sparse_parameters(self._module),
                tensors,
            )
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the whole optimizers' states."""
        offload = self._session.offload if self._session else None
        if self._is_ordinary and offload is None:
            # A copy, as the state would keep a mapped file.
            states = tree_map_only(Tensor, Tensor.clone, checkpoint["optimizer_states"])
            with restoring("the optimizers"):
                super().load_optimizer_state_dict({"optimizer_states": states})
            return
        stage_module = self._running.stage_module
        held, sparse = stage_module.sharding.held(), sparse_parameters(self._module)
        states = checkpoint["optimizer_states"]
        # A checkpoint may have no states of optimizers, as for Lightning's strategies.
        for optimizer, state in zip(self.optimizers, states, strict=False):
            groups = stage_module.group_names(optimizer)
            with restoring("the optimizers"):
                local = local_optimizer_state(state, groups, held, sparse)
                if offload is None:
                    optimizer.load_state_dict(local)
                    move_optimizers([optimizer], self.root_device)
                else:
                    offload.load_state_dict(local)
                restore_masters(optimizer, sparse.values())

    # State

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the running session: a callback that holds the Trainer may be pickled."""
        return {**super().__getstate__(), "_session": None, "_ended": None}

    @property
    def _is_at_rest(self) -> bool:
        """Whether nothing runs and this rank has the module whole: steps are Lightning's own."""
        return self._session is None and self._ended is None

    @property
    def _is_starting(self) -> bool:
        """Whether the Trainer prepares a run, on all ranks."""
        trainer = self._trainer
        runs = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        return self._session is None and runs

    @property
    def _trainer(self) -> pl.Trainer | None:
        """The Trainer of the module, if it is attached to one on this rank."""
        return None if self.lightning_module is None else trainer_of(self.lightning_module)

    @property
    def _is_ordinary(self) -> bool:
        """Whether this rank has the module as one process has it: all of it, and dense."""
        if self._save_distributed_checkpoint or sparse_parameters(self._module):
            return False
        return self.g_inter == 1 or self._is_at_rest

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _running(self) -> _Session:
        if self._session is None:
            raise RuntimeError(
                "AxoSparseStrategy holds a module only while the Trainer runs."
                + see("values-between-layers")
            )
        return self._session

    @property
    def _stored(self) -> _Stored:
        if self._session is None and self._ended is not None:
            return self._ended
        return _Stored(self._running.stage_module, self._running.tensors, self._running.folders)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its name."""
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="message-driven pipeline x data parallelism over MPI",
            override=True,
        )


def _tensors_of(stage_module: StageModule) -> StageTensors:
    return StageTensors(lambda: stage_module.groups.inter)
