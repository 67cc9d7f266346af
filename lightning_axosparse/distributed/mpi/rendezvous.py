"""Creates the store with which NCCL and gloo connect the ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ipaddress import ip_address

import psutil
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from mpi4py import MPI
from torch.distributed import FileStore, HashStore, Store, TCPStore

from lightning_axosparse.distributed.mpi.environment import placement
from lightning_axosparse.support.messages import rank_zero_warn
from lightning_axosparse.support.troubleshooting import see

_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 5.0
"""For how many seconds a rank tries to connect to an address of another host."""


def common_store(required: bool) -> Store:
    """A store that all ranks share; collective over the job.

    On one host it is a file in rank 0's memory, which processes of other users cannot open, and
    nobody listens. Over several hosts rank 0 serves it over TCP, on the first of its addresses that
    every rank can connect to; it sends the address by MPI, and no host name has to resolve. If
    none can and training does not need one, each rank gets a store of its own, with which only
    groups of MPI can be created.
    """
    if placement().nodes == 1 and (store := _store_in_memory()) is not None:
        return store
    addresses = MPI.COMM_WORLD.bcast(list(host_addresses(placement().nodes)))
    address = _reachable(addresses)
    if address is not None:
        return _tcp_store(address)
    reason = (
        f"No address of rank 0's host ({', '.join(addresses) or 'it has none'}) can be connected "
        f"to over TCP from every rank within {_CONNECT_SECONDS:.0f} s"
    )
    if required:
        raise MisconfigurationException(
            f"{reason}, and NCCL needs one to start. Open TCP between the hosts, or connect them "
            "by an interface that is up on all of them (`ip address`)." + see("starting-ranks")
        )
    rank_zero_warn(
        f"{reason}. Training goes over MPI alone; groups of gloo cannot be made."
        + see("starting-ranks")
    )
    return HashStore()


def _store_in_memory() -> FileStore | None:
    """A store in a file without a name; None if a rank cannot open it. Collective over the job."""
    world, path = MPI.COMM_WORLD, ""
    if world.rank == 0 and hasattr(os, "memfd_create"):
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('axosparse-store')}"
    path = world.bcast(path)
    opened = world.allgather(os.access(path, os.R_OK | os.W_OK))
    return FileStore(path, world.size) if all(opened) else None


def host_addresses(nodes: int) -> Iterator[str]:
    """The addresses of this host that all ranks of a job may reach, IPv4 first.

    On one host, whose system has no files in memory, it is that of the loopback device. Link-local
    ones are of no use without the name of an interface.
    """
    if nodes == 1:
        yield _LOOPBACK
        return
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces = psutil.net_if_addrs().items()
    entries = [entry for name, found in interfaces if name in up for entry in found]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family:
                address = ip_address(entry.address.partition("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    yield str(address)


def _reachable(addresses: list[str]) -> str | None:
    """The first of rank 0's addresses that every rank can connect to; collective."""
    world = MPI.COMM_WORLD
    with ExitStack() as open_until_all_have_tried:
        listening = []
        if world.rank == 0:
            listeners = [open_until_all_have_tried.enter_context(_listen(a)) for a in addresses]
            listening = [listener.getsockname()[:2] for listener in listeners]
        listening = world.bcast(listening)
        with ThreadPoolExecutor() as threads:
            results = set(zip(addresses, threads.map(_connects, listening), strict=True))
        found = set.intersection(*world.allgather(results))
    return next((address for address in addresses if (address, True) in found), None)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)


def _connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _tcp_store(address: str) -> TCPStore:
    world = MPI.COMM_WORLD
    server = None
    if world.rank == 0:
        listener = _listen(address)
        port = listener.getsockname()[1]
        server = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    port = world.bcast(server and server.port)
    return server or TCPStore(address, port, is_master=False)
