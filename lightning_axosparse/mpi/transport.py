"""Transport: ordered messages of any size between two ranks, without waiting for either.

A message is a header and a block of bytes. It travels as an envelope of fixed size, which every MPI
sends eagerly. A small block fits in there; on one node a larger one lies in shared memory, and the
envelope says where. Else it travels by itself. Then both receives are posted ahead of time: the
block's with the size that the message of the same number had in the previous batch, which sender
and receiver both remember. A block that has outgrown that size goes late: an empty message takes
the posted receive, and the right one is posted when the envelope has come.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from lightning_axosparse.backoff import BackOff
from lightning_axosparse.mpi.buffers import raw
from lightning_axosparse.mpi.progress import Progress
from lightning_axosparse.mpi.shared import Inbox, Outbox, Place
from lightning_axosparse.mpi.staging import Ready, Staging
from lightning_axosparse.whereabouts import here

_ENVELOPE_BYTES = 4096
_INLINE_BYTES = 2048
_ENVELOPE, _BLOCK, _LATE = range(3)  # tags


class _Envelope(NamedTuple):
    header: bytes | None  # None: too long, comes late
    header_size: int
    block: bytes | Place | None  # None: comes by itself
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
        assert self.block is not None
        header = self.envelope.header if self.header is None else bytes(self.header)
        assert header is not None
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
        staging: where blocks lie for MPI.
        shares_memory: whether blocks go through shared memory.
        progress: moves messages where MPI does not.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        neighbour: int,
        window: int,
        staging: Staging,
        shares_memory: bool,
        progress: Progress,
    ) -> None:
        self.arrived: deque[tuple[bytes, Tensor]] = deque()
        self._comm, self._neighbour, self._window = comm, neighbour, window
        self._staging, self._progress = staging, progress
        self._inbox = Inbox()
        self._outbox = Outbox() if shares_memory else None
        self._departing: deque[tuple[bytes, Tensor, Ready]] = deque()
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
        self._progress.begin()

    def send(self, header: bytes, block: Tensor) -> None:
        """Send a message; ``block`` (1-D uint8, contiguous) must not change before ``end``."""
        self._departing.append((header, *self._staging.outgoing(block)))
        self._depart()

    def poll(self) -> None:
        """Let messages progress and append to ``arrived`` those that are whole, in order."""
        self._depart()
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
            header, block = self._coming.popleft().message()
            self.arrived.append((header, self._staging.incoming(block)))
            if self._posted < self._to_post:
                self._post()

    def end(self) -> None:
        """Wait until everything sent has left and every posted receive has been filled."""
        with BackOff(self._awaited) as back_off:
            while self._requests or self._departing:
                self.poll()
                back_off.pause()
        self._progress.end()

    def _awaited(self) -> str:
        neighbour = here().rank - self._comm.rank + self._neighbour
        return f"the last messages to and from rank {neighbour}"

    def _depart(self) -> None:
        while self._departing and self._departing[0][2]():
            header, block, _ = self._departing.popleft()
            self._start(header, block)

    def _start(self, header: bytes, block: Tensor) -> None:
        number, size = len(self._sent), block.numel()
        posted = self._sent_before[number] if number < len(self._sent_before) else 0
        enclosed = self._enclosed(block)
        apart = enclosed is None
        late = apart and size > posted
        long_header = len(header) > _ENVELOPE_BYTES - _INLINE_BYTES - 512
        envelope = _Envelope(
            header=None if long_header else header,
            header_size=len(header),
            block=enclosed,
            block_size=size,
            late=late,
        )
        self._isend(pickle.dumps(envelope), _ENVELOPE)
        if long_header:
            self._isend(header, _LATE)
        if posted and (late or not apart):
            self._isend(b"", _BLOCK)
        if apart:
            self._isend(block, _LATE if late else _BLOCK)
        self._sent.append(size if apart else 0)
        self._progress.stir()

    def _enclosed(self, block: Tensor) -> bytes | Place | None:
        """What an envelope says of a block that does not travel by itself."""
        if block.numel() <= _INLINE_BYTES:
            return block.cpu().numpy().tobytes()
        return None if self._outbox is None else self._outbox.put(block)

    def _isend(self, buffer: bytes | Tensor, tag: int) -> None:
        request = self._comm.Isend(_message(buffer), self._neighbour, tag)
        # The completion keeps the buffer alive until the message has left.
        self._track(request, partial(_forget_buffer, buffer))

    def _irecv(self, buffer: bytearray | Tensor, tag: int, completion: Callable[[], None]) -> None:
        self._track(self._comm.Irecv(_message(buffer), self._neighbour, tag), completion)

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
        posted = self._staging.empty(size) if size else None
        arrival = _Arrival(bytearray(_ENVELOPE_BYTES), posted)
        self._coming.append(arrival)
        self._posted += 1
        self._irecv(arrival.envelope_buffer, _ENVELOPE, arrival.envelope_came)
        if posted is not None:
            arrival.missing += 1
            self._irecv(posted, _BLOCK, arrival.part_came)

    def _open(self, arrival: _Arrival) -> None:
        """Post what the envelope announces; called in the order of sending."""
        envelope = arrival.envelope
        assert envelope is not None
        arrival.opened = True
        if envelope.header is None:
            arrival.header = bytearray(envelope.header_size)
            arrival.missing += 1
            self._irecv(arrival.header, _LATE, arrival.part_came)
        if isinstance(envelope.block, bytes):
            arrival.block = _writable(envelope.block)
        elif envelope.block is not None:
            arrival.block = self._inbox.take(envelope.block)
        elif envelope.late:
            arrival.block = self._staging.empty(envelope.block_size)
            arrival.missing += 1
            self._irecv(arrival.block, _LATE, arrival.part_came)
        else:
            arrival.block = arrival.posted
        self._received.append(envelope.block_size if envelope.block is None else 0)


def _message(buffer: bytes | bytearray | Tensor) -> list[Any]:
    return raw(buffer) if isinstance(buffer, Tensor) else [buffer, MPI.BYTE]
