"""Gives ranks the time to say which of them is lost, before MPICH's mpiexec ends the job.

mpiexec has a proxy on every host, which starts the ranks there and kills them as soon as a file of
one is closed: its connection to the proxy, or its standard output. It then names the exit code at
most, and takes 0 for success. So the ranks of a host hold these files of each other.
"""

from __future__ import annotations

import os
import socket
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress

from mpi4py import MPI

from lightning_axosparse.distributed.rank_status import this_rank

_CONNECTION = "PMI_FD"
"""The environment variable with the number of the file by which a rank is connected."""

_FILES = 3  # standard output, standard error, and the connection


def hold_files(near: Sequence[int]) -> list[int]:
    """Hold the files of the next rank of this host that its proxy watches; collective.

    Args:
        near: the ranks of this host in order, this one among them.

    Returns:
        Their numbers here. To be closed before MPI ends: it waits for all ranks, and no one else
        ends the job if that one is gone.
    """
    world, token = MPI.COMM_WORLD, str(this_rank().token).encode()
    if sys.platform != "linux":
        return []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.setblocking(False)
        mailbox.bind("")  # to a name without a file
        mailboxes = world.allgather((mailbox.getsockname(), token))
        holder = near[near.index(world.rank) - 1]
        if this_rank().proxy and holder != world.rank:
            with suppress(OSError, KeyError, ValueError):
                _send_files(mailbox, *mailboxes[holder])
        world.Barrier()
        return _receive_files(mailbox, token)


def _send_files(mailbox: socket.socket, address: bytes, token: bytes) -> None:
    files = array("i", [1, 2, int(os.environ[_CONNECTION])])
    mailbox.sendmsg([token], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)], 0, address)


def _receive_files(mailbox: socket.socket, token: bytes) -> list[int]:
    """The files that came with this rank's token, which other users do not know."""
    while True:
        try:
            message, files, *_ = socket.recv_fds(mailbox, len(token) + 1, _FILES)
        except BlockingIOError:
            return []
        if message == token:
            for file in files:
                os.set_inheritable(file, False)
            return files
        for file in files:
            os.close(file)
