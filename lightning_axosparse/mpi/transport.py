"""Transport: ordered messages of any size between two ranks, without waiting for either.

A message is a header and a block of bytes. It travels as an envelope of fixed size, which every MPI
sends eagerly, and, unless all of it fits in there, a block. Both receives are posted ahead of time:
the block's with the size that the message of the same number had in the previous batch, which
sender and receiver both remember. A block that has outgrown that size goes late: an empty message
takes the posted receive, and the right one is posted when the envelope has come.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from lightning_axosparse.backoff import BackOff

_ENVELOPE_BYTES = 4096
_INLINE_BYTES = 2048
_ENVELOPE, _BLOCK, _LATE = range(3)  # tags


class _Envelope(NamedTuple):
    header: bytes | None  # None: too long, comes late
    header_size: int
    block: bytes | None  # None: comes by itself
    block_size: int
    late: bool


@dataclass
class _Arrival:
    """A message on its way in."""

    envelope_buffer: bytearray
    posted: Tensor | None
    opened: bool = False
    missing: int = 1
    envelope: _Envelope | None = None
    header: bytearray | None = None
    block: Tensor | None = None

    def part_came(self) -> None:
        self.missing -= 1

    def envelope_came(self) -> None:
        self.envelope = pickle.loads(self.envelope_buffer)
        self.missing -= 1

    def message(self) -> tuple[bytes, Tensor]:
        assert self.envelope is not None
        header = self.envelope.header if self.header is None else bytes(self.header)
        assert header is not None
        if self.envelope.block is not None:
            return header, _writable(self.envelope.block)
        assert self.block is not None
        return header, self.block[: self.envelope.block_size]


def _writable(block: bytes) -> Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0).byte()


def _forget_buffer(buffer: Any) -> None:
    pass


class Mailbox:
    """Both directions of the traffic between this rank and one neighbour.

    Args:
        comm: communicator used by nobody else.
        neighbour: rank of the neighbour in ``comm``.
        window: how many receives are posted ahead.
    """

    def __init__(self, comm: MPI.Comm, neighbour: int, window: int) -> None:
        self.arrived: deque[tuple[bytes, Tensor]] = deque()
        self._comm, self._neighbour, self._window = comm, neighbour, window
        self._requests: list[MPI.Request] = []
        self._completions: list[Callable[[], None]] = []
        self._sent: list[int] = []
        self._sent_before: list[int] = []
        self._received: list[int] = []
        self._received_before: list[int] = []
        self._coming: deque[_Arrival] = deque()
        self._to_post = 0
        self._posted = 0

    def begin(self, messages: int) -> None:
        """Start a batch in which ``messages`` will be received."""
        self._sent_before, self._sent = self._sent, []
        self._received_before, self._received = self._received, []
        self._to_post, self._posted = messages, 0
        while self._posted < min(self._window, self._to_post):
            self._post()

    def send(self, header: bytes, block: Tensor) -> None:
        """Send a message; ``block`` (1-D uint8, contiguous, CPU) must not change before ``end``."""
        number, size = len(self._sent), block.numel()
        posted = self._sent_before[number] if number < len(self._sent_before) else 0
        inline = size <= _INLINE_BYTES
        late = not inline and size > posted
        long_header = len(header) > _ENVELOPE_BYTES - _INLINE_BYTES - 512
        envelope = _Envelope(
            header=None if long_header else header,
            header_size=len(header),
            block=block.numpy().tobytes() if inline else None,
            block_size=size,
            late=late,
        )
        self._isend(pickle.dumps(envelope), _ENVELOPE)
        if long_header:
            self._isend(header, _LATE)
        if posted and (inline or late):
            self._isend(b"", _BLOCK)
        if not inline:
            self._isend(block.numpy(), _LATE if late else _BLOCK)
        self._sent.append(0 if inline else size)

    def poll(self) -> None:
        """Let messages progress and append to ``arrived`` those that are whole, in order."""
        if self._requests:
            completed = MPI.Request.Testsome(self._requests)
            for index in sorted(completed or ()):
                self._completions[index]()
            if completed:
                self._forget(set(completed))
        for arrival in self._coming:
            if arrival.envelope is None:
                break
            if not arrival.opened:
                self._open(arrival)
        while self._coming and self._coming[0].opened and not self._coming[0].missing:
            self.arrived.append(self._coming.popleft().message())
            if self._posted < self._to_post:
                self._post()

    def end(self) -> None:
        """Wait until everything sent has left and every posted receive has been filled."""
        back_off = BackOff()
        while self._requests:
            self.poll()
            back_off.pause()

    def _isend(self, buffer: Any, tag: int) -> None:
        request = self._comm.Isend([buffer, MPI.BYTE], self._neighbour, tag)
        # The completion keeps the buffer alive until the message has left.
        self._track(request, partial(_forget_buffer, buffer))

    def _irecv(self, buffer: Any, tag: int, completion: Callable[[], None]) -> None:
        self._track(self._comm.Irecv([buffer, MPI.BYTE], self._neighbour, tag), completion)

    def _track(self, request: MPI.Request, completion: Callable[[], None]) -> None:
        self._requests.append(request)
        self._completions.append(completion)

    def _forget(self, completed: set[int]) -> None:
        keep = [index for index in range(len(self._requests)) if index not in completed]
        self._requests = [self._requests[index] for index in keep]
        self._completions = [self._completions[index] for index in keep]

    def _post(self) -> None:
        before = self._received_before
        size = before[self._posted] if self._posted < len(before) else 0
        posted = torch.empty(size, dtype=torch.uint8) if size else None
        arrival = _Arrival(bytearray(_ENVELOPE_BYTES), posted)
        self._coming.append(arrival)
        self._posted += 1
        self._irecv(arrival.envelope_buffer, _ENVELOPE, arrival.envelope_came)
        if posted is not None:
            arrival.missing += 1
            self._irecv(posted.numpy(), _BLOCK, arrival.part_came)

    def _open(self, arrival: _Arrival) -> None:
        """Post what the envelope announces; called in the order of sending."""
        envelope = arrival.envelope
        assert envelope is not None
        arrival.opened = True
        if envelope.header is None:
            arrival.header = bytearray(envelope.header_size)
            arrival.missing += 1
            self._irecv(arrival.header, _LATE, arrival.part_came)
        if envelope.late:
            arrival.block = torch.empty(envelope.block_size, dtype=torch.uint8)
            arrival.missing += 1
            self._irecv(arrival.block.numpy(), _LATE, arrival.part_came)
        else:
            arrival.block = arrival.posted
        self._received.append(0 if envelope.block is not None else envelope.block_size)


def neighbours(
    stage: int, stages: int, replica: int, window: int
) -> tuple[Mailbox | None, Mailbox | None]:
    """Connect one stage of one pipeline to its previous and next stage.

    The first call for a grid is collective over all ranks of the job, whose rank is
    ``replica * stages + stage``.
    """
    comm = _pipeline(stages, replica, stage)
    previous = Mailbox(comm, stage - 1, window) if stage > 0 else None
    following = Mailbox(comm, stage + 1, window) if stage < stages - 1 else None
    return previous, following


@cache
def _pipeline(stages: int, replica: int, stage: int) -> MPI.Comm:
    """The ranks of one pipeline; kept, because an MPI has only so many communicators."""
    return MPI.COMM_WORLD.Split(replica, stage)
