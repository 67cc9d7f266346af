"""Connects adjacent stages, and sends ordered messages between them without waiting.

A message is a header and a block of bytes. An envelope of fixed size announces it, which every MPI
sends eagerly, before the receiver asks for it. A small block is inside the envelope. On one node a
larger one is in shared memory, and the envelope has its address. Any other block is a separate
message of MPI.

Receives are posted ahead of time, for the envelope and for the block. The receive of the block has
the size that the message of the same number had in the previous batch, which sender and receiver
both remember. A larger block is late: an empty message completes the posted receive, and the
receiver posts one of the right size when it has read the envelope. If the third block of a batch
had 1 MB and now has 2 MB, for example, only its transfer begins later than usual.

Blocks of a GPU go from device to device where both ranks can map the same memory, else through
pinned host memory (``staging.py``).
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from mpi4py import MPI
from torch import Tensor

from lightning_axosparse.distributed.mpi.shared_memory import (
    SlotAddress,
    SlotWriter,
    read,
    shares_memory,
)
from lightning_axosparse.distributed.mpi.staging import (
    DeviceSlot,
    Ready,
    Staging,
    shares_device_memory,
    staging_of,
)
from lightning_axosparse.distributed.mpi.work import raw
from lightning_axosparse.distributed.rank_status import BackOff, blocked, this_rank

_ENVELOPE_BYTES = 4096
_INLINE_BYTES = 2048
_ENVELOPE, _BLOCK, _LATE, _UNUSED = range(4)  # Tags of messages.
_MIN_PAUSE, _MAX_PAUSE = 1e-4, 2e-3  # Seconds between two turns of the progress thread.
_CALLS_PER_TURN = 50  # Each transfers about one fragment.
_PROBE_SECONDS = 0.02  # In this time the sender of the probe makes no call of MPI.


class _Envelope(NamedTuple):
    header: bytes | None  # None if it is too long, and sent late.
    header_size: int
    block: bytes | SlotAddress | DeviceSlot | None  # None if it is a separate message of MPI.
    block_size: int
    late: bool


@dataclass
class _Incoming:
    """A message that is being received."""

    envelope_buffer: bytearray
    posted: Tensor | None
    opened: bool = False
    missing: int = 1
    envelope: _Envelope | None = None
    header: bytearray | None = None
    block: Tensor | DeviceSlot | None = None

    def part_received(self) -> None:
        self.missing -= 1

    def envelope_received(self) -> None:
        self.envelope = pickle.loads(self.envelope_buffer)
        self.missing -= 1

    def message(self) -> tuple[bytes, Tensor | DeviceSlot]:
        assert self.envelope is not None
        assert self.block is not None
        header = self.envelope.header if self.header is None else bytes(self.header)
        assert header is not None
        if isinstance(self.block, DeviceSlot):
            return header, self.block
        return header, self.block[: self.envelope.block_size]


def _writable(block: bytes) -> Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0).byte()


class ProgressThread:
    """A thread that calls MPI during batches, so that MPI transfers messages.

    As its calls slow down the rank, the pause between them grows from 0.1 ms after a message was
    sent to 2 ms. Without :meth:`start` there is no thread.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._batches = 0
        self._pause = _MIN_PAUSE
        self._under_way = threading.Event()

    def start(self) -> None:
        """Start the thread; MPI has to provide ``MPI_THREAD_MULTIPLE``."""
        threading.Thread(target=self._run, name="axosparse-progress", daemon=True).start()

    def begin_batch(self) -> None:
        """Call MPI until :meth:`end_batch`; batches may overlap."""
        self._batches += 1
        self._under_way.set()

    def message_sent(self) -> None:
        """Call MPI at short intervals again."""
        self._pause = _MIN_PAUSE

    def end_batch(self) -> None:
        """End one batch."""
        self._batches -= 1
        if not self._batches:
            self._under_way.clear()

    def _run(self) -> None:
        while self._under_way.wait():
            time.sleep(self._pause)
            self._pause = min(_MAX_PAUSE, 1.5 * self._pause)
            for _ in range(_CALLS_PER_TURN):
                self._comm.Iprobe(tag=_UNUSED)


class Channel:
    """The messages to and from one other rank.

    Args:
        comm: a communicator with no other messages between these two ranks.
        peer: the other rank, in ``comm``.
        window: number of receives that are posted ahead.
        staging: makes blocks accessible to MPI.
        shares_memory: whether blocks go through shared memory.
        progress: the thread that transfers messages if MPI does not.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        peer: int,
        window: int,
        staging: Staging,
        shares_memory: bool,
        progress: ProgressThread,
    ) -> None:
        self.arrived: deque[tuple[bytes, Tensor]] = deque()
        """Received messages, header and block, in the order in which they were sent."""
        self._comm, self._peer, self._window = comm, peer, window
        self._staging, self._progress = staging, progress
        self._writer = SlotWriter() if shares_memory else None
        self._to_send: deque[tuple[bytes, Tensor | DeviceSlot, Ready]] = deque()
        self._requests: list[MPI.Request] = []
        self._completions: list[Callable[[], None]] = []
        # Sizes of the blocks that were separate messages, in this and the previous batch.
        self._sent: list[int] = []
        self._sent_before: list[int] = []
        self._received: list[int] = []
        self._received_before: list[int] = []
        self._incoming: deque[_Incoming] = deque()
        self._to_post = 0
        self._posted = 0

    def begin(self, messages: int) -> None:
        """Start a batch in which ``messages`` will be received."""
        self._sent_before, self._sent = self._sent, []
        self._received_before, self._received = self._received, []
        self._to_post, self._posted = messages, 0
        while self._posted < min(self._window, self._to_post):
            self._post()
        self._progress.begin_batch()

    def send(self, header: bytes, block: Tensor) -> None:
        """Send a message; ``block`` (1-D uint8, contiguous) must not change before ``end``."""
        self._to_send.append((header, *self._staging.outgoing(block)))
        self._send_ready()

    def poll(self) -> None:
        """Make progress, and append the messages that are complete to ``arrived``, in order."""
        self._send_ready()
        self._staging.free_read()
        if self._requests:
            completed = MPI.Request.Testsome(self._requests)
            for index in sorted(completed or ()):
                self._completions[index]()
            if completed:
                self._forget(set(completed))
        for message in self._incoming:
            if message.envelope is None:
                break
            if not message.opened:
                self._open(message)
        while self._incoming and self._incoming[0].opened and not self._incoming[0].missing:
            header, block = self._incoming.popleft().message()
            self.arrived.append((header, self._staging.incoming(block)))
            if self._posted < self._to_post:
                self._post()

    def end(self) -> None:
        """Wait until everything is sent and every posted receive is complete."""
        with BackOff(self._awaited) as back_off:
            while self._requests or self._to_send:
                self.poll()
                back_off.pause()
        self._progress.end_batch()

    def _awaited(self) -> str:
        peer = this_rank().rank + self._comm.rank - self._peer  # The last stage is the first rank.
        return f"the last messages to and from rank {peer}"

    def _send_ready(self) -> None:
        while self._to_send and self._to_send[0][2]():
            header, block, _ = self._to_send.popleft()
            self._start(header, block)

    def _start(self, header: bytes, block: Tensor | DeviceSlot) -> None:
        number = len(self._sent)
        size = block.size if isinstance(block, DeviceSlot) else block.numel()
        posted = self._sent_before[number] if number < len(self._sent_before) else 0
        inside = self._inside_envelope(block)
        by_itself = inside is None
        late = by_itself and size > posted
        long_header = len(header) > _ENVELOPE_BYTES - _INLINE_BYTES - 512
        envelope = _Envelope(
            header=None if long_header else header,
            header_size=len(header),
            block=inside,
            block_size=size,
            late=late,
        )
        self._isend(pickle.dumps(envelope), _ENVELOPE)
        if long_header:
            self._isend(header, _LATE)
        if posted and (late or not by_itself):
            self._isend(b"", _BLOCK)
        if by_itself:
            assert isinstance(block, Tensor)
            self._isend(block, _LATE if late else _BLOCK)
        self._sent.append(size if by_itself else 0)
        self._progress.message_sent()

    def _inside_envelope(
        self, block: Tensor | DeviceSlot
    ) -> bytes | SlotAddress | DeviceSlot | None:
        """Return a small block, or its address in shared memory; None for a separate message."""
        if isinstance(block, DeviceSlot):
            return block
        if block.numel() <= _INLINE_BYTES:
            return block.cpu().numpy().tobytes()
        return None if self._writer is None else self._writer.write(block)

    def _isend(self, buffer: bytes | Tensor, tag: int) -> None:
        request = self._comm.Isend(_mpi_buffer(buffer), self._peer, tag)
        # The completion keeps the buffer alive until the message is sent.
        self._track(request, partial(_release, buffer))

    def _irecv(self, buffer: bytearray | Tensor, tag: int, completion: Callable[[], None]) -> None:
        self._track(self._comm.Irecv(_mpi_buffer(buffer), self._peer, tag), completion)

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
        message = _Incoming(bytearray(_ENVELOPE_BYTES), posted)
        self._incoming.append(message)
        self._posted += 1
        self._irecv(message.envelope_buffer, _ENVELOPE, message.envelope_received)
        if posted is not None:
            message.missing += 1
            self._irecv(posted, _BLOCK, message.part_received)

    def _open(self, message: _Incoming) -> None:
        """Receive the message that the envelope announces; called in the order of sending."""
        envelope = message.envelope
        assert envelope is not None
        message.opened = True
        if envelope.header is None:
            message.header = bytearray(envelope.header_size)
            message.missing += 1
            self._irecv(message.header, _LATE, message.part_received)
        if isinstance(envelope.block, bytes):
            message.block = _writable(envelope.block)
        elif isinstance(envelope.block, DeviceSlot):
            message.block = envelope.block
        elif envelope.block is not None:
            message.block = read(envelope.block)
        elif envelope.late:
            message.block = self._staging.empty(envelope.block_size)
            message.missing += 1
            self._irecv(message.block, _LATE, message.part_received)
        else:
            message.block = message.posted
        self._received.append(envelope.block_size if envelope.block is None else 0)


def _release(buffer: Any) -> None:
    pass


def _mpi_buffer(buffer: bytes | bytearray | Tensor) -> list[Any]:
    return raw(buffer) if isinstance(buffer, Tensor) else [buffer, MPI.BYTE]


class Connection(NamedTuple):
    """The connection of one stage to the adjacent stages.

    Attributes:
        comm: the ranks of its pipeline.
        shares_memory: adjacent stage -> whether messages go through shared memory.
        shares_device: adjacent stage -> whether blocks go from device to device.
        progress: a thread that transfers messages; started if MPI does not.
    """

    comm: MPI.Comm
    shares_memory: dict[int, bool]
    shares_device: dict[int, bool]
    progress: ProgressThread


def connect_stages(
    stage: int, stages: int, replica: int, window: int, device: torch.device
) -> tuple[Channel | None, Channel | None]:
    """Connect one stage of one pipeline to its previous and next stage; None if there is none.

    The first call for a grid is collective over all ranks of the job. A channel posts ``window``
    receives ahead, and takes blocks on ``device``.
    """
    comm, shares_memory, shares_device, progress = connect(stages, replica, stage, device)
    channels = {
        adjacent: Channel(
            comm, adjacent, window, staging_of(device, shares_device[adjacent]), shared, progress
        )
        for adjacent, shared in shares_memory.items()
    }
    return channels.get(stage - 1), channels.get(stage + 1)


@cache  # MPI has a limited number of communicators, and the tests take a while.
def connect(stages: int, replica: int, stage: int, device: torch.device) -> Connection:
    """Test which way messages reach the adjacent stages best; collective over the job."""
    world = MPI.COMM_WORLD
    with blocked("the other stages to connect"):
        comm = world.Split(replica, stage)
        adjacent = [other for other in (stage - 1, stage + 1) if 0 <= other < stages]
        shared = {other: shares_memory(comm, other) for other in adjacent}
        on_device = {
            other: shared[other] and shares_device_memory(comm, other, device) for other in adjacent
        }
        # Every other pair first, so that two rounds test all pairs.
        by_mpi = sorted((n for n in adjacent if not shared[n]), key=lambda n: min(n, stage) % 2)
        progresses = [has_async_progress(comm, other) for other in by_mpi]
        thread = ProgressThread(comm)
        threads_allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if threads_allowed and not all(progresses):
            thread.start()
        following = shared.get(stage + 1), on_device.get(stage + 1)
        results = world.allgather((*following, all(progresses)))
    pairs = [shares for shares, _, _ in results if shares is not None]
    progresses_everywhere = all(ok for _, _, ok in results)
    rank_zero_debug(describe_connections(pairs, progresses_everywhere, threads_allowed))
    if device.type != "cpu":
        direct = [shares for _, shares, _ in results if shares is not None]
        rank_zero_debug(
            f"{direct.count(True)} of {len(direct)} pairs of adjacent stages exchange activations "
            "from device to device, the others through pinned host memory."
        )
    return Connection(comm, shared, on_device, thread)


def describe_connections(shared: list[bool], progresses: bool, threads_allowed: bool) -> str:
    """Describe for the log how pairs of adjacent stages exchange messages."""
    apart = shared.count(False)
    if not apart:
        return "All adjacent stages exchange activations through shared memory."
    text = f"{apart} of {len(shared)} pairs of adjacent stages do not share memory; there MPI "
    if progresses:
        return text + "transfers a message while its sender computes."
    text += "transfers a large message only while its sender is inside MPI: "
    if threads_allowed:
        return text + "a thread of each such rank calls MPI at intervals."
    return text + (
        "stages will wait for one another. This MPI does not provide MPI_THREAD_MULTIPLE, with "
        "which a thread could help; see also its documentation on asynchronous progress."
    )


def has_async_progress(comm: MPI.Comm, peer: int) -> bool:
    """Return whether a megabyte from the lower rank arrives while that rank does not call MPI.

    This rank and rank ``peer`` both call it; it takes about 20 ms.
    """
    large, small, answer = np.zeros(2**20, np.uint8), np.zeros(1), np.zeros(1, bool)
    _synchronize(comm, peer)
    if comm.rank < peer:
        requests = [comm.Isend(large, peer)]
        time.sleep(_PROBE_SECONDS)
        requests += [comm.Isend(small, peer), comm.Irecv(answer, peer)]
    else:
        # The small message leaves after the pause. The large one has arrived before it, or not.
        received, pause_over = comm.Irecv(large, peer), comm.Irecv(small, peer)
        _wait(lambda: received.Test() or pause_over.Test())
        answer[0] = not pause_over.Test()
        requests = [received, pause_over, comm.Isend(answer, peer)]
    _wait(lambda: MPI.Request.Testall(requests))
    return bool(answer[0])


def _synchronize(comm: MPI.Comm, peer: int) -> None:
    """Wait until both ranks have called this and are connected."""
    requests = [comm.Isend(np.zeros(0), peer), comm.Irecv(np.zeros(0), peer)]
    _wait(lambda: MPI.Request.Testall(requests))


def _wait(done: Callable[[], bool]) -> None:
    with BackOff(lambda: "a message that tests the MPI of the adjacent stage") as back_off:
        while not done():
            back_off.pause()
