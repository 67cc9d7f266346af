"""AxoSparseStrategy: answers each of Lightning's hooks by handing it to the room that knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import time
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse import regrid as regridding
from lightning_axosparse.adapters.checkpoint import (
    gather_model_state,
    gather_optimizer_state,
    local_model_state,
    local_optimizer_state,
)
from lightning_axosparse.adapters.meetings import Meetings, position
from lightning_axosparse.adapters.requirements import (
    foreseen_optimizers,
    refuse_callbacks,
    refuse_module,
    refuse_optimizers,
    refuse_together,
    refuse_unmade,
    unless_made_later,
)
from lightning_axosparse.arguments import (
    BOOL,
    BYTES,
    COUNT,
    FUNCTION,
    LAYERS,
    NONE,
    TEXT,
    TIMEOUT,
    checked,
    instance_of,
    one_of,
)
from lightning_axosparse.autogrid import suitable_grid
from lightning_axosparse.checkpoint_io import clear_unfinished_checkpoints
from lightning_axosparse.cutting import Cutter
from lightning_axosparse.dealing import UNDIVIDED, deal, profile_example, refuse_no_example
from lightning_axosparse.deployment import Deployment
from lightning_axosparse.groups import Groups
from lightning_axosparse.memory import free_bytes
from lightning_axosparse.offload import OptimizerOffload, refuse_joint_optimizers
from lightning_axosparse.pipeline.limit import FixedLimit, Limit, MemoryLimit
from lightning_axosparse.pipeline.loss_weights import (
    LossRule,
    MicrobatchLoss,
    MicrobatchWeight,
)
from lightning_axosparse.pipeline.recompute import Recompute
from lightning_axosparse.pipeline.schedule import SCHEDULES
from lightning_axosparse.planning.automatic import default_microbatches
from lightning_axosparse.ranks import GridStrategy
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.configure import dense_shapes
from lightning_axosparse.sparse.masters import restore_masters
from lightning_axosparse.sparse.reading import Policy
from lightning_axosparse.sparse.swap import sparse_parameters
from lightning_axosparse.stepping import Stepper
from lightning_axosparse.timing import clock
from lightning_axosparse.whereabouts import here


class AxoSparseStrategy(GridStrategy):
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
            "auto" lets the planner choose before the ranks start, by what the module's layers take
            on its ``example_input_array``, which should be like a micro-batch, and the memory that
            is free, and tells why; without an example it takes the shortest balanced pipeline whose
            parameters, gradients and optimizer state (AdamW's, float32) fit.
        microbatches: micro-batches per batch and replica; None takes ``4 * g_inter`` (one without a
            pipeline). A batch that they do not divide is cut unevenly and weighted rightly; one
            with fewer samples gives one micro-batch a sample. Evaluation takes the closest number
            that divides the batch.
        pipeline: attribute path of the ``nn.Sequential`` or ``nn.ModuleList`` whose layers are
            dealt to the stages, such as ``"model.transformer.h"``. None takes the only candidate.
        balance: "parameters" deals layers so that the largest stage is as small as possible, "time"
            so that the slowest is as fast as possible, timing them on the module's
            ``example_input_array``, which should be like a micro-batch; a sequence gives the number
            of layers of each stage.
        in_flight: most micro-batches that a stage may hold between forward and backward. None takes
            what memory allows after the first step, and again after a ticket was drawn: from
            ``g_inter``, which is what 1F1B holds, to ``2 * g_inter``, which hides jitter and
            latency. No number of the training depends on it.
        schedule: "message-driven", or for comparison "1f1b" or "gpipe".
        transport: "mpi" gives each stage a rank; "loopback" runs all stages of a replica in one
            process, through the same schedule, for notebooks, debuggers and tests.
        split_batch: cuts a batch into micro-batches, ``(batch, microbatches) -> list``, such as
            ``lambda batch, n: list(zip(batch[0].chunk(n, 1), batch[1].chunk(n)))``. None cuts what
            the DataLoader shows to have an entry for each sample, along that dimension, and hands
            the rest to every micro-batch whole; the first batch says which. Where the loader does
            not show it, all first dimensions must agree.
        microbatch_loss: how the losses of the micro-batches make up that of the batch. "auto" sees
            how ``training_step`` averages: means are weighted by their denominators (samples, or
            tokens that are not padding, or class weights), sums are added up; what does not combine
            is refused, or warned of. "mean" and "sum" do as they say, without a word.
        microbatch_weight: weights for a loss that cannot be seen through: a function of a part of
            the batch that returns what its loss was divided by, or the name of the entry that is
            counted: of integers those that are not -100, of a mask its sum.
        check_loss: computes the loss of the first training batch that is cut as a whole, too, in
            evaluation mode and on the layers of the last stage alone, and refuses one that differs:
            for contrastive losses, losses of a batch's statistics, and to be sure.
            ``training_step`` runs twice more on that batch's last stage; what it logs and the
            states of metrics are left alone.
        recompute: saves memory for time: every so many layers of a stage keep only their first
            input, and are computed again in the backward pass; "sqrt" takes the square root of the
            stage's layers (AxoNN). Gradients are the same to the bit.
        offload_optimizer: keeps the optimizer's state in host memory and steps there; the device
            keeps parameters and gradients. Parameters of less than 32 bits get float32 masters.
        offload_bucket: elements that are on their way through the host at a time, with it.
        regrid: once the ticket is drawn, goes on from the next epoch with shorter pipelines and
            more replicas: with so many stages, a divisor of ``g_inter``; with "auto" as few as
            memory allows. Batches, their order and the losses stay the same.
        timeout: seconds, or a ``timedelta``, for which a rank waits for others at a time; after
            that every rank that can be reached prints where it is, and the job ends with the names
            of those that do not answer. It should be longer than what one rank may do while others
            wait for it: its first batch, a batch that comes late, a checkpoint.

    Raises:
        MisconfigurationException: for arguments out of range, here; for a grid, a module or an MPI
            that does not fit, before any rank is started.
    """

    strategy_name = "axosparse"

    @checked(
        MisconfigurationException,
        g_inter=COUNT | one_of("auto"),
        microbatches=COUNT | NONE,
        pipeline=TEXT | NONE,
        balance=one_of("parameters", "time") | LAYERS,
        in_flight=COUNT | NONE,
        schedule=one_of(*SCHEDULES),
        transport=one_of("mpi", "loopback"),
        split_batch=FUNCTION | NONE,
        microbatch_loss=one_of("auto", "mean", "sum"),
        microbatch_weight=FUNCTION | TEXT | NONE,
        check_loss=BOOL,
        timeout=TIMEOUT,
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
        pipeline: str | None = None,
        balance: Literal["parameters", "time"] | Sequence[int] = "parameters",
        in_flight: int | None = None,
        schedule: Literal["message-driven", "1f1b", "gpipe"] = "message-driven",
        transport: Literal["mpi", "loopback"] = "mpi",
        split_batch: Callable[[Any, int], list[Any]] | None = None,
        microbatch_loss: MicrobatchLoss = "auto",
        microbatch_weight: MicrobatchWeight | None = None,
        check_loss: bool = False,
        recompute: int | Literal["sqrt"] | None = None,
        offload_optimizer: bool = False,
        offload_bucket: int = 4_000_000,
        regrid: int | Literal["auto"] | None = None,
        timeout: float | timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        refuse_together(g_inter, in_flight, schedule, transport, balance)
        regridding.refuse_together(regrid, transport, in_flight, schedule)
        if g_inter != "auto":
            regridding.refuse_length(regrid, g_inter)
        super().__init__(
            g_inter if transport == "mpi" and g_inter != "auto" else 1,
            timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout),
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )
        self._chooses_grid = g_inter == "auto"
        self.g_inter = 1 if g_inter == "auto" else g_inter
        self.schedule = schedule
        self.transport = transport
        self._microbatches, self._in_flight = microbatches, in_flight
        self._container_path, self._balance = pipeline, balance
        self._split_batch, self._recompute = split_batch, recompute
        self._loss_rule = LossRule(microbatch_loss, microbatch_weight, check_loss)
        self._offload_bucket = offload_bucket if offload_optimizer else None
        self._offload: OptimizerOffload | None = None
        self._regrid = regrid
        self._move: regridding.Regrid | None = None
        self.regridded: regridding.Regridded | None = None
        """The move to shorter pipelines in the last fit, if there was one."""
        self._deployment: Deployment | None = None
        self._meetings: Meetings | None = None

    @property
    def microbatches(self) -> int:
        """Micro-batches per batch and replica."""
        return self._microbatches or default_microbatches(self.g_inter)

    # Setting up and leaving

    def refuse_unfit(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot work, before anything is set up or any rank is started.

        Raises:
            MisconfigurationException: for a module or callback that cannot work in a pipeline.
        """
        self._refuse_call(trainer)
        with unless_made_later(self._module):
            self._deal_layers()

    def _refuse_call(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot work whatever the layers are."""
        self.connect(self._module)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_module(self._module)
            if self._launcher is not None:
                self._refuse_optimizers(foreseen_optimizers(self._module))
        if self.g_inter > 1:
            refuse_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        if self._regrid is not None:
            regridding.refuse_length(self._regrid, self.g_inter)

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module, choosing the number of stages if that is open."""
        if self._chooses_grid:
            self._choose_grid(model)
            self._chooses_grid = False
        super().connect(model)

    def _deal_layers(self) -> None:
        """Deal the module's layers to the stages, and refuse those that cannot be."""
        module = self._module
        self._dealt = UNDIVIDED
        if self.g_inter > 1 or self._recompute is not None:
            sizes = None if isinstance(self._balance, str) else self._balance
            self._dealt = deal(module, self._container_path, sizes, self.g_inter)
        if self.g_inter > 1 and self._balance == "time":
            refuse_no_example(module)
        if self._regrid is not None:
            regridding.refuse_module(module)

    def setup(self, trainer: pl.Trainer) -> None:
        """Deal the module to the stages; optimizers are configured for the whole of it before."""
        assert self.accelerator is not None
        module = self._module
        self._refuse_call(trainer)
        self._deal_layers()
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(module)
        if trainer.state.fn == TrainerFn.FITTING:
            if self.is_global_zero:
                clear_unfinished_checkpoints(trainer)
            self.regridded = None
            with dense_shapes(module) as made:
                self.setup_optimizers(trainer)
                made += self.optimizers
            self._refuse_optimizers(self.optimizers)
        stage = self.grid.stage
        stages = range(self.g_inter) if self.transport == "loopback" else range(stage, stage + 1)
        assert self._groups is not None
        if self.g_inter > 1:
            self._time_layers()
            rank_zero_info(str(self._dealt))
        recompute = (
            None if self._recompute is None else Recompute(self._recompute, self.root_device)
        )
        deployment = Deployment(
            module, self._dealt, self._groups, stages, self.root_device, recompute
        )
        deployment.occupy(self.optimizers)
        self._deployment = deployment
        if self._offload_bucket is None:
            _optimizers_to_device(self.optimizers, self.root_device)
        elif self.optimizers:
            self._offload = OptimizerOffload(
                self.optimizers[0],
                self._offload_bucket,
                self.root_device,
                lambda parameters: self._stepper.await_gradients(parameters),
            )
        self.setup_precision_plugin()
        self._stepper = Stepper(
            trainer,
            self.precision_plugin,
            SCHEDULES[self.schedule],
            Cutter(trainer, self.microbatches, self._split_batch),
            self._loss_rule,
            steps_in_parts=self._offload is not None,
        )
        if self.grid.world_size > 1:
            self._meetings = Meetings(self._groups)
            # First of all callbacks: the others' hooks may contain collectives.
            trainer.callbacks.insert(0, self._meetings)  # type: ignore[attr-defined]
        limit = partial(self._limit, trainer)
        self._stepper.open(deployment, limit(self._groups))
        if self._regrid is not None and trainer.state.fn == TrainerFn.FITTING:
            self._move = regridding.Regrid(
                self._regrid,
                self._dealt,
                deployment,
                self._stepper,
                limit,
                self._free_bytes,
                self.microbatches,
            )

    def _refuse_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        refuse_optimizers(optimizers)
        if self._offload_bucket is not None:
            for optimizer in optimizers:
                refuse_joint_optimizers(optimizer)

    def _time_layers(self) -> None:
        """Deal by time, if asked for, with the times that the first rank takes."""
        if self._balance == "time":
            seconds: list[float] = []
            if self.global_rank == 0:
                arguments = self._dealt, self.precision_plugin, self.root_device
                seconds = [layer.seconds for layer in profile_example(self._module, *arguments)]
            self._dealt = self._dealt.by_time(self.broadcast(seconds))

    def _choose_grid(self, model: pl.LightningModule) -> None:
        if self._ranks > 1:
            refuse_unmade(model)
            decision = suitable_grid(
                self,
                model,
                self._container_path,
                self._microbatches,
                self._in_flight,
                self._recompute is not None,
                "time" if self._balance == "time" else "parameters",
            )
            self.g_inter = self._ranks_a_replica = decision.g_inter
            rank_zero_info(str(decision))

    def _free_bytes(self) -> int:
        return free_bytes(self.root_device, self.ranks_on_device)

    def _limit(self, trainer: pl.Trainer, groups: Groups) -> Limit:
        stages = self.g_inter // groups.grid.sharing
        if self._in_flight is not None or stages == 1 or self.schedule != "message-driven":
            return FixedLimit(self._in_flight or stages)
        return MemoryLimit(
            stages,
            self._free_bytes,
            self.root_device,
            lambda: trainer.global_step,
            groups.gather,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Go over to shorter pipelines at the first batch of an epoch, once there is a ticket."""
        if self._move is not None and batch_idx == 0:
            moved = self._move.begin_epoch(self._module.trainer.current_epoch, self.optimizers)
            if moved is not None:
                self.regridded, self._groups = moved, self._deployed.groups
                here().place_in(self.grid)

    def on_train_end(self) -> None:
        """Say if there was no ticket that pipelines could have become shorter after."""
        if self._move is not None:
            self._move.warn_without_draw()

    def model_to_device(self) -> None:
        """Need nothing: the deployment moves what lives here."""

    def teardown(self) -> None:
        """Hand back an ordinary module: whole and dense on every rank."""
        if self._offload is not None:
            self._offload.remove()
            self._offload = None
        self._move = None
        if self._meetings is not None:
            callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
            if self._meetings in callbacks:  # A hook may have set others.
                callbacks.remove(self._meetings)
            self._meetings = None
        if self._deployment is not None:
            self._stepper.close()
            self._deployment.leave(self.optimizers)
            self._deployment = None
        super().teardown()

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` forward and back; ``backward`` only hands the gradients over."""
        with here().step(*position(self._module.trainer)):
            return self._stepper.train(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` forward."""
        context = self.precision_plugin.val_step_context
        return self._evaluate(self._module.validation_step, context, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` forward."""
        context = self.precision_plugin.test_step_context
        return self._evaluate(self._module.test_step, context, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` forward; every stage returns the last one's predictions."""
        context = self.precision_plugin.predict_step_context
        return self._evaluate(self._module.predict_step, context, *args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with here().step(*position(self._module.trainer)):
            return self._stepper.evaluate(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Give the parameters the gradients that ``training_step`` has made."""
        return self._stepper.hand_over_gradients(closure_loss)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, and time the step without the closure."""
        closed = time()

        def timed_closure() -> Any:
            nonlocal closed
            result = closure()
            closed = time()
            return result

        result = super().optimizer_step(optimizer, timed_closure, model, **kwargs)
        clock.add("optimizer", closed, time(), self.grid.stage)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients local while Lightning accumulates them."""
        with self._stepper.gradients_kept_local():
            yield

    # Sparse storage

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients that this rank handed to the all-reduce in its last step."""
        reducer = self._deployed.reducer
        return 0 if reducer is None else reducer.reduced_bytes

    @property
    def in_flight(self) -> int:
        """Most micro-batches that a stage may hold, as of the last training batch."""
        return self._stepper.pipeline.limit.value

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Most micro-batches that each stage of this rank held in its last training batch."""
        return self._stepper.pipeline.peak_in_flight

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that live on this rank, by name, in the module's order."""
        return self._deployed.split.held()

    def counted_parameters(self) -> set[str]:
        """The names that this rank counts, so that each is counted once over a pipeline."""
        return self._deployed.split.counted()

    def sparsify(self, masks: Mapping[str, Tensor], policy: Policy = "sparse") -> None:
        """Store the masked parameters of this rank, and their optimizer state, sparse.

        Args:
            masks: name of a held parameter -> bool tensor of its shape, True where an entry is
                kept. Read one at a time.
            policy: as for :func:`lightning_axosparse.sparsify`.
        """
        optimizer = self.optimizers[0] if self.optimizers else None
        sparsify(self._module, masks, optimizer, policy=policy)
        if optimizer is not None:
            restore_masters(optimizer, sparse_parameters(self._module).values())
        self._stepper.pipeline.limit.measure_again()
        if self._move is not None:
            self._move.after_draw()

    # Checkpoints: one file, dense, as one process writes it

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on the first rank; collective."""
        if self._deployment is None:
            return self._module.state_dict()
        deployed, groups = self._deployment, self._deployment.groups
        if self.grid.feed > 0:
            return {}
        with self._stepper.metrics.states_shared(
            partial(groups.collect, stage=deployed.last_stage)
        ):
            if self.grid.replica > 0:
                return {}
            return gather_model_state(deployed.split, deployed.stages, groups.gather_to_first_stage)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what lives here of a whole module's state."""
        state = checkpoint["state_dict"]
        if self._deployment is not None:
            state = local_model_state(state, self._deployment.split, self._deployment.stages)
            strict = False
        self._module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state on the first rank; collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self.grid.replica > 0:
            return {}
        deployed = self._deployed
        return gather_optimizer_state(
            optimizer,
            deployed.optimizer_groups[self.optimizers.index(optimizer)],
            deployed.split.names,
            sparse_parameters(self._module),
            deployed.groups.gather_to_first_stage,
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what lives here of the whole optimizers' states."""
        deployed = self._deployed
        for optimizer, state, groups in zip(
            self.optimizers, checkpoint["optimizer_states"], deployed.optimizer_groups, strict=True
        ):
            names, sparse = deployed.split.names, sparse_parameters(self._module)
            local = local_optimizer_state(state, optimizer, groups, names, sparse)
            if self._offload is None:
                optimizer.load_state_dict(local)
                _optimizers_to_device([optimizer], self.root_device)
            else:
                self._offload.load_state_dict(local)
            restore_masters(optimizer, sparse.values())

    # State

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _deployed(self) -> Deployment:
        if self._deployment is None:
            raise RuntimeError("AxoSparseStrategy holds a module only while the Trainer runs.")
        return self._deployment

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its name."""
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="message-driven pipeline x data parallelism over MPI",
            override=True,
        )
