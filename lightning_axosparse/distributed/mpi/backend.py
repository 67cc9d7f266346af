"""Registers the torch.distributed backend "mpi4py", and starts it in a rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from mpi4py import MPI

from lightning_axosparse.distributed.mpi.process_group import MPIProcessGroup
from lightning_axosparse.distributed.mpi.start.environment import placement
from lightning_axosparse.distributed.mpi.start.rendezvous import common_store
from lightning_axosparse.distributed.rank_status import blocked
from lightning_axosparse.support.troubleshooting import see

NAME = "mpi4py"


def init_process_group(device_type: str) -> None:
    """Connect all ranks of the MPI job by torch.distributed; once in a process.

    Args:
        device_type: ``"cpu"``, or ``"cuda"`` for NCCL beside MPI.

    Raises:
        MisconfigurationException: if torch.distributed runs already on another backend, or if no
            address connects the ranks for NCCL.
    """
    if dist.is_initialized():
        if isinstance(dist.group.WORLD, MPIProcessGroup):
            return
        raise MisconfigurationException(
            f"torch.distributed is initialised already, with the backend {dist.get_backend()!r}; "
            f"the ranks of this strategy are connected by {NAME!r}. Remove the call of "
            "torch.distributed.init_process_group, or destroy that process group before."
            + see("starting-ranks")
        )
    placed = placement()
    backend = NAME if device_type == "cpu" else f"cpu:{NAME},cuda:nccl"
    store = common_store(required=device_type != "cpu")
    dist.init_process_group(backend, store=store, rank=placed.rank, world_size=placed.world_size)


def _create(options: Any, _: Any) -> MPIProcessGroup:
    world = MPI.COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    members = world.group.Incl(ranks)
    with blocked("the other ranks of a process group to connect"):
        communicator = world.Create_group(members)
        members.Free()
        return MPIProcessGroup(communicator, options.store)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
