"""GridStrategy: the ranks of a Lightning strategy as a grid, and collectives over its replicas."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    ReduceOp,
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_axosparse.adapters.requirements import refuse_world
from lightning_axosparse.adapters.sampling import process_dataloader
from lightning_axosparse.checkpoint_io import AtomicCheckpointIO
from lightning_axosparse.grid import Grid
from lightning_axosparse.groups import Groups
from lightning_axosparse.mpi import environment
from lightning_axosparse.mpi.launcher import MPILauncher
from lightning_axosparse.whereabouts import blocked, here, leave

T = TypeVar("T")


class GridStrategy(ParallelStrategy):
    """A strategy whose ranks are ``g_data`` replicas of ``ranks_a_replica`` consecutive ranks.

    Every rank of a replica is given the same samples and logs the same values, so Lightning's
    reductions go over replicas.

    Args:
        ranks_a_replica: ranks that make up a replica.
        timeout: seconds that a rank waits for others, at a time, until it ends the job.
        accelerator: Lightning's, as are the following.
        parallel_devices: devices of this node's ranks.
        cluster_environment: None: what MPI says.
        checkpoint_io: how files are read and written.
        precision_plugin: how numbers are rounded.

    Raises:
        MisconfigurationException: if this is one of several processes that MPI does not connect.
    """

    def __init__(
        self,
        ranks_a_replica: int,
        timeout: float,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        environment.check_connected()
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment or environment.MPIJobEnvironment(),
            checkpoint_io,
            precision_plugin,
        )
        self._ranks_a_replica = ranks_a_replica
        self._timeout = timeout
        self._num_nodes = 1
        self._groups: Groups | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or one that writes files whole or not at all."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            # It is ignored by one that wraps a user's.
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def num_nodes(self) -> int:
        """Number of nodes, as given to the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def ranks_on_device(self) -> int:
        """How many ranks share this rank's device; on CPU, this node."""
        assert self.parallel_devices is not None
        return self.parallel_devices.count(self.root_device)

    @property
    def grid(self) -> Grid:
        """The ranks of the job, as they now are."""
        if self._groups is not None:
            return self._groups.grid
        return Grid(self._ranks, self._ranks_a_replica, self.global_rank)

    @property
    def is_distributed(self) -> bool:
        """Whether there are ranks that Lightning has to give different samples."""
        return self.grid.feeds > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which samples this rank is given."""
        return {"num_replicas": self.grid.feeds, "rank": self.grid.feed}

    def set_world_ranks(self) -> None:
        """Tell Lightning's rank-zero helpers which rank this is."""
        vars(rank_zero_only).update(rank=self.global_rank)

    def _configure_launcher(self) -> None:
        devices = len(self.parallel_devices or ())
        job_size = environment.job_size()
        refuse_world(devices, self.num_nodes, job_size)
        Grid(self._ranks, self._ranks_a_replica)
        if job_size == 1 and self._ranks > 1:
            self._launcher = MPILauncher(self, self._ranks)

    @property
    def _ranks(self) -> int:
        return len(self.parallel_devices or (None,)) * self.num_nodes

    def setup_environment(self) -> None:
        """Join the other ranks."""
        if self._ranks > 1:
            # Importing it starts MPI, which one rank does without.
            from lightning_axosparse.mpi.backend import init_process_group
            from lightning_axosparse.mpi.watchdog import watchdog

            environment.limit_threads()
            watchdog().timeout = self._timeout
            with blocked("all ranks to connect"):
                init_process_group(self.root_device.type)
        grid = Grid(self._ranks, self._ranks_a_replica, self.global_rank)
        self._groups = Groups(grid, self.root_device.type)
        here().place_in(grid)
        here().begin_run()
        self.set_world_ranks()
        super().setup_environment()

    def on_exception(self, exception: BaseException) -> None:
        """End the job, so that no other rank waits for this one for ever."""
        if self._ranks > 1:
            leave()
            environment.abort_job(exception, self.grid)

    @property
    def inter_group(self) -> dist.ProcessGroup | None:
        """The stages of this rank's pipeline; None if this rank runs all of them."""
        return None if self._groups is None else self._groups.inter

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """This rank's stage in all replicas; None if there is one replica."""
        return None if self._groups is None else self._groups.data

    @property
    def _logged(self) -> dist.ProcessGroup | None:
        return None if self._groups is None else self._groups.logged

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks of the job."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Hand every rank the ``obj`` of rank ``src``."""
        if not dist.is_initialized():
            return obj
        values = [obj]
        dist.broadcast_object_list(values, src=src)
        return values[0]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all replicas, shape ``(g_data, *tensor.shape)``.

        With one replica it is the tensor itself, as on one process. Replicas that share their
        batches count as one, because they log the same values.
        """
        group = group or self._logged
        if group is None:
            return tensor
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce a tensor over the replicas, of which those that share batches count as one."""
        group = group or self._logged
        if group is None or not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks of the job, or any, decide so."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes.item())

    def process_dataloader(self, dataloader: object) -> object:
        """Let all ranks of a feed load the same samples."""
        return process_dataloader(dataloader, self.grid.feed)
