"""Arranges the ranks of a Lightning strategy in a grid, and runs collectives over its replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.distributed import ReduceOp
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.mpi import environment
from lightning_axosparse.distributed.process_groups import ProcessGroups, broadcast
from lightning_axosparse.distributed.rank_status import blocked, mark_finished, this_rank
from lightning_axosparse.strategy.compat.internals import (
    all_gather,
    reduce,
    remove_checkpoint,
    wants_norms_synchronized,
    with_atomic_files,
)
from lightning_axosparse.strategy.compat.loaders import process_dataloader
from lightning_axosparse.strategy.compat.lockstep import JobEnd, cause_of, preparing_together
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.launcher.launcher import MPILauncher
from lightning_axosparse.strategy.validation import (
    norms_not_synchronized,
    validate_local_rank,
    validate_world_size,
)
from lightning_axosparse.support.files import put_sockets_in
from lightning_axosparse.support.memory import map_larger_blocks
from lightning_axosparse.support.patched import patched

T = TypeVar("T")


class MPIStrategy(ParallelStrategy):
    """A strategy whose ranks are ``g_data`` replicas of consecutive ranks.

    All ranks of a replica get the same samples and log the same values, so Lightning's reductions
    are over replicas. A ``cluster_environment`` says how the cluster works, such as how Slurm
    requeues jobs; the ranks are always those of the MPI job.
    """

    def __init__(self, config: Config) -> None:
        environment.check_connected()
        super().__init__(
            config.accelerator,
            config.parallel_devices,
            config.cluster_environment or environment.MPIJobEnvironment(),
            config.checkpoint_io,
            config.precision_plugin,
        )
        self._shown_placement: environment.Placement | None = None
        """The placement of this rank that a step sees; None for the real one."""
        self.config = config
        self.num_nodes = 1
        """Number of nodes, as given to the Trainer, which sets it."""
        self._groups: ProcessGroups | None = None
        # Setup registers here how its changes are undone; teardown closes it.
        self._undo = ExitStack()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, or one that never leaves a partly written file."""
        self._checkpoint_io = with_atomic_files(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, on the first rank."""
        if self.is_global_zero:
            remove_checkpoint(self.checkpoint_io, filepath)

    @property
    def _placement(self) -> environment.Placement:
        return self._shown_placement or environment.placement()

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._placement.world_size

    @property
    def global_rank(self) -> int:
        """This rank's number in the job."""
        return self._placement.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self._placement.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this rank's node."""
        return self._placement.node_rank

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def ranks_on_device(self) -> int:
        """Number of ranks on this rank's device; on CPU, on this node."""
        assert self.parallel_devices is not None
        return self.parallel_devices.count(self.root_device)

    @property
    def grid(self) -> Grid:
        """The grid of ranks; after a regrid, the new one."""
        if self._groups is not None:
            return self._groups.grid
        return self._grid_of(self.global_rank)

    def _grid_of(self, rank: int) -> Grid:
        config = self.config
        shared = {"g_tensor": config.tensors.ranks, "g_expert": config.experts.ranks}
        return Grid(self._rank_count, config.ranks_per_pipeline, rank, **shared)

    @property
    def is_distributed(self) -> bool:
        """Whether there are several data-parallel ranks, which get different samples.

        In a step, whether there are several replicas, which log different values.
        """
        return (self.grid.data_size if self._shown_placement is None else self.grid.g_data) > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The data-parallel size and rank, for a ``DistributedSampler``."""
        return {"num_replicas": self.grid.data_size, "rank": self.grid.data_rank}

    def step_context(
        self, precision: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes the context of a step, in which each replica is one rank.

        So a step that divides by ``trainer.world_size``, or logs if ``trainer.is_global_zero``,
        does the same as on one process. The context includes that of ``precision``.
        """
        grid = self.grid
        if grid.data_size == grid.world_size:
            return precision
        replica = replace(environment.placement(), world_size=grid.g_data, rank=grid.replica)

        @contextmanager
        def as_replica() -> Iterator[None]:
            with patched(self, "_shown_placement", replica), precision():
                yield

        return as_replica

    def set_world_ranks(self) -> None:
        """Set the rank for Lightning's rank-zero functions."""
        vars(rank_zero_only).update(rank=self.global_rank)
        if not self.is_global_zero:  # The first rank warns of Lightning's own deprecations.
            warnings.filterwarnings(
                "ignore", category=FutureWarning, module=r"(pytorch_)?lightning\."
            )

    def _configure_launcher(self) -> None:
        devices = len(self.parallel_devices or ())
        job_size = environment.job_size()
        if self._rank_count > 1 and wants_norms_synchronized(self):
            raise norms_not_synchronized()
        validate_world_size(devices, self.num_nodes, job_size)
        self._grid_of(0)  # It raises an error if the ranks cannot form the grid.
        if job_size == 1 and self._rank_count > 1:
            self._launcher = MPILauncher(self, self._rank_count)

    @property
    def _rank_count(self) -> int:
        return len(self.parallel_devices or (None,)) * self.num_nodes

    def setup_environment(self) -> None:
        """Connect this rank to the others and create the process groups of the grid."""
        grid = self._grid_of(self.global_rank)
        this_rank().set_grid(grid)
        if self._rank_count > 1:
            validate_local_rank(self.local_rank, len(self.parallel_devices or ()), self.num_nodes)
            # Importing it starts MPI, which is not needed on one rank.
            from lightning_axosparse.distributed.mpi.process_group import init_process_group
            from lightning_axosparse.distributed.mpi.watchdog import watchdog

            map_larger_blocks()
            put_sockets_in()
            self._undo.enter_context(environment.limited_threads())
            self._undo.enter_context(preparing_together())
            assert self.lightning_module is not None
            self._undo.enter_context(JobEnd().added_to(self.lightning_module.trainer))
            watchdog().timeout = self.config.timeout_seconds
            with blocked("all ranks to connect"):
                init_process_group(self.root_device.type)
        self._groups = ProcessGroups(grid)
        this_rank().begin_run()
        self._undo.callback(this_rank().end_run)
        self.set_world_ranks()
        super().setup_environment()

    def teardown(self) -> None:
        """Undo the changes of setup in this process, in reverse order."""
        self._undo.close()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process groups, and the functions that undo the setup."""
        return {**super().__getstate__(), "_groups": None, "_undo": ExitStack()}

    def on_exception(self, exception: BaseException) -> None:
        """Abort the job, so that no other rank waits for this one."""
        super().on_exception(exception)
        if self._rank_count > 1:
            mark_finished()
            environment.abort_job(cause_of(exception))

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """All ranks; None if there is one."""
        return None if self._groups is None else self._groups.world

    @property
    def inter_group(self) -> dist.ProcessGroup | None:
        """The stages of this rank's pipeline; None if this rank runs all of them."""
        return None if self._groups is None else self._groups.inter

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """This rank's stage in all replicas; None if there is one replica."""
        return None if self._groups is None else self._groups.data

    @property
    def _logging_group(self) -> dist.ProcessGroup | None:
        return None if self._groups is None else self._groups.logged

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks of the job."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast the picklable ``obj`` of rank ``src`` to all ranks."""
        world = dist.group.WORLD  # None where torch.distributed is not initialized
        return obj if world is None else broadcast(obj, src, world)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all replicas, shape ``(g_data, *tensor.shape)``.

        With one replica it returns the tensor itself, as on one process.
        """
        if group is None or group is dist.group.WORLD:  # `LightningModule.all_gather` names it.
            group = self._logging_group
        return tensor if group is None else all_gather(tensor, group, sync_grads)

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce a tensor over the replicas."""
        group = group or self._logging_group
        if group is None or not isinstance(tensor, Tensor):
            return tensor
        return reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``decision`` is true on all ranks of the job, or on any."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes.item())

    def process_dataloader(self, dataloader: object) -> object:
        """Let all ranks that get the same samples augment them alike."""
        return process_dataloader(dataloader, self.grid.data_rank)
