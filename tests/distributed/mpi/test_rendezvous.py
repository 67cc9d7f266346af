"""The store that ranks share: what serves it, and what happens if nothing can."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.ranks import run_ranks


def listening() -> set[Any]:
    """Where this process listens: MPI does, too."""
    connections = psutil.Process().net_connections("inet")
    return {connection.laddr for connection in connections if connection.status == "LISTEN"}


def share(name: str) -> str:
    """What the ranks put into a store of each other's, and where the first one listens for it."""
    from mpi4py import MPI

    from lightning_axosparse.distributed.mpi.rendezvous import common_store

    world, before = MPI.COMM_WORLD, listening()
    store = common_store(required=True)
    store.set_timeout(timedelta(seconds=60))
    store.set(f"{name}{world.rank}", str(world.rank))
    assert store.get(f"{name}{1 - world.rank}") == str(1 - world.rank).encode()
    found: str = world.bcast(" ".join(address.ip for address in listening() - before))
    world.Barrier()
    return found


def gloo_sum(store: Any) -> float:
    """A sum over ranks that gloo has connected by this store."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    dist.init_process_group("gloo", store=store, rank=MPI.COMM_WORLD.rank, world_size=2)
    value = torch.ones(1)
    dist.all_reduce(value, group=dist.new_group([0, 1]))
    dist.destroy_process_group()
    return value.item()


@contextmanager
def firewall(*shut: str) -> Iterator[None]:
    """Refuse this process connections to these addresses."""
    connect = socket.create_connection

    def refuse(address: tuple[str, int], *args: Any, **options: Any) -> socket.socket:
        if address[0] in shut:
            raise ConnectionRefusedError
        return connect(address, *args, **options)

    socket.create_connection = refuse
    try:
        yield
    finally:
        socket.create_connection = connect


def rendezvous() -> dict[str, Any]:
    from mpi4py import MPI
    from torch.distributed import HashStore

    from lightning_axosparse.distributed.mpi import rendezvous as module

    found: dict[str, Any] = {
        "one host": list(module.host_addresses(1)),
        "two": list(module.host_addresses(2)),
    }
    found["alone"] = share("alone")
    found["gloo"] = gloo_sum(module.common_store(required=False))
    module._store_in_memory = lambda: None  # as on other systems and several hosts
    found["loopback"] = share("loopback")
    addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    module.host_addresses = lambda nodes: iter(addresses)
    with firewall("127.0.0.2" if MPI.COMM_WORLD.rank else "127.0.0.3"):
        found["third"] = share("third")
    warnings: list[str] = []
    module.rank_zero_warn = warnings.append
    with firewall(*addresses):
        assert isinstance(module.common_store(required=False), HashStore)
        with pytest.raises(MisconfigurationException) as error:
            module.common_store(required=True)
    return {**found, "warned": warnings, "refused": str(error.value)}


def test_the_address_is_one_that_all_ranks_can_connect_to():
    for found in run_ranks(2, rendezvous):
        assert found["one host"] == ["127.0.0.1"]
        assert not any(ip_address(address).is_loopback for address in found["two"])
        assert found["alone"] == ""
        assert found["gloo"] == 2
        assert found["loopback"] == "127.0.0.1"
        assert found["third"] == "127.0.0.4"
        assert "groups of gloo cannot be made" in found["warned"][0]
        assert "127.0.0.2, 127.0.0.3, 127.0.0.4" in found["refused"]
        assert "NCCL needs one" in found["refused"]
