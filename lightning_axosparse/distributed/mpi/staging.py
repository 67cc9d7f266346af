"""Makes blocks of messages accessible to the other rank: on the CPU, and on GPUs.

On one node, blocks of GPUs go from device to device. The sender copies a block into a slot, memory
of its device, on a separate stream; the message leaves when that copy is done, with the number of
the slot. The receiver copies the block out of the slot, also on a separate stream, and then sets
the slot free in host memory that both ranks map. It maps a slot itself once, with the first message
in it (CUDA IPC). So MPI only says which slots are filled, and no byte of a block passes through the
host.

Elsewhere, blocks of GPUs go through pinned host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from lightning_axosparse.distributed.mpi.shared_memory import Address, arena, open_arena

if TYPE_CHECKING:
    from mpi4py import MPI

Ready = Callable[[], bool]
"""Returns whether a block may be sent; called until this is True."""

_MOST_SLOTS = 4096
"""More slots than messages that are ever on their way between two ranks."""

_flags: list[Tensor] = []
"""All flags of this process: the other rank may set slots free when their staging is gone."""


class DeviceSlot(NamedTuple):
    """A filled slot on the sender's device; can be pickled.

    Attributes:
        number: number of the slot.
        size: bytes of the block in it.
        memory: a function and its arguments, which map the slot; None if it was sent before.
        arena: the arena in host memory that has the sender's flags.
        offset: offset of the flags there; that of a slot is 1 while the slot is in use.
    """

    number: int
    size: int
    memory: tuple[Any, ...] | None
    arena: Address
    offset: int


class Staging:
    """Makes blocks of messages (1-D uint8 tensors) accessible to MPI: on the CPU as they are."""

    def outgoing(self, block: Tensor) -> tuple[Tensor | DeviceSlot, Ready]:
        """Return the tensor that MPI reads to send ``block``, or its slot, and when it is ready."""
        return block, lambda: True

    def empty(self, size: int) -> Tensor:
        """Return a tensor of ``size`` bytes to which MPI may write immediately."""
        return torch.empty(size, dtype=torch.uint8)

    def incoming(self, block: Any) -> Tensor:
        """Return a received block or slot on the device, ready for the current stream."""
        received: Tensor = block
        return received

    def free_read(self) -> None:
        """Set the slots free that have been read."""


class _Streams(Staging):
    """Copies between a device and other memory, on a separate stream for each direction.

    The host waits for no copy, and a kernel only for the block that it needs.

    Args:
        device: the device.
        runtime: ``torch.cuda``, or a stand-in with its streams and events.
    """

    def __init__(self, device: torch.device, runtime: Any = torch.cuda) -> None:
        self._device, self._runtime = device, runtime
        self._leaving, self._arriving = runtime.Stream(device), runtime.Stream(device)

    def _copy_out(self, block: Tensor, target: Tensor) -> Ready:
        """Start to copy a block behind the kernels that compute it; return when that is done."""
        copied = self._runtime.Event()
        self._leaving.wait_stream(self._runtime.current_stream(self._device))
        with self._runtime.stream(self._leaving):
            target.copy_(block, non_blocking=True)
            copied.record(self._leaving)

        def ready(source: Tensor = block) -> bool:  # The default keeps the block alive until then.
            return bool(copied.query())

        return ready

    def _copy_in(self, block: Tensor) -> tuple[Tensor, Any]:
        """Copy a block to the device, for the current stream; return it, and the copy's event."""
        current, copied = self._runtime.current_stream(self._device), self._runtime.Event()
        with self._runtime.stream(self._arriving):
            arrived = torch.empty_like(block, device=self._device)
            arrived.copy_(block, non_blocking=True)
            copied.record(self._arriving)
        current.wait_stream(self._arriving)
        arrived.record_stream(current)
        return arrived, copied


class PinnedStaging(_Streams):
    """Copies the blocks of a GPU to and from pinned host memory.

    Torch's allocator of pinned memory uses a block again only when the copies from and to it are
    done.
    """

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """Return a copy in pinned memory, which MPI may read when the copy is done."""
        host = self.empty(block.numel())
        return host, self._copy_out(block, host)

    def empty(self, size: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def incoming(self, block: Tensor) -> Tensor:
        """Return a copy on the device, for which the current stream waits."""
        return self._copy_in(block)[0]


class DeviceStaging(_Streams):
    """Passes blocks from device to device, through slots, to and from one other rank.

    Args:
        device: the device.
        runtime: as for :class:`PinnedStaging`.
        share: returns a function and its arguments, which map a tensor in another process.
    """

    def __init__(
        self,
        device: torch.device,
        runtime: Any = torch.cuda,
        share: Callable[[Tensor], tuple[Any, ...]] = reduce_tensor,
    ) -> None:
        super().__init__(device, runtime)
        self._share = share
        own = arena()
        assert own is not None
        flags = own.block(_MOST_SLOTS)
        _flags.append(flags)
        self._arena, self._offset = own.address, own.offset(flags)
        self._in_use = flags.zero_().numpy()
        self._slots: list[Tensor] = []
        self._mapped: dict[int, Tensor] = {}
        self._reading: list[tuple[Any, DeviceSlot]] = []

    def outgoing(self, block: Tensor) -> tuple[Tensor | DeviceSlot, Ready]:
        """Return a slot, which holds the block when it is ready; an empty block as it is."""
        size = block.numel()
        if not size:
            return block, lambda: True
        number, memory = self._free_slot(size)
        self._in_use[number] = True
        ready = self._copy_out(block, self._slots[number][:size])
        return DeviceSlot(number, size, memory, self._arena, self._offset), ready

    def _free_slot(self, size: int) -> tuple[int, tuple[Any, ...] | None]:
        """Return the number of a free slot, and how to map it if it is new."""
        free = [number for number in range(len(self._slots)) if not self._in_use[number]]
        fitting = [number for number in free if self._slots[number].numel() >= size]
        if fitting:
            return fitting[0], None
        slot = torch.empty(size, dtype=torch.uint8, device=self._device)
        if free:  # It is too small.
            self._slots[free[0]] = slot
        else:
            self._slots.append(slot)
        return free[0] if free else len(self._slots) - 1, self._share(slot)

    def incoming(self, block: Tensor | DeviceSlot) -> Tensor:
        """Return a copy of the block in a slot, for which the current stream waits."""
        if isinstance(block, Tensor):  # It is empty.
            return block.to(self._device)
        if block.memory is not None:
            map_slot, arguments = block.memory
            self._mapped[block.number] = map_slot(*arguments)
        arrived, copied = self._copy_in(self._mapped[block.number][: block.size])
        self._reading.append((copied, block))
        return arrived

    def free_read(self) -> None:
        """Set the slots free of which the copies are done."""
        while self._reading and self._reading[0][0].query():
            _, slot = self._reading.pop(0)
            host = open_arena(slot.arena)
            assert host is not None
            host[slot.offset + slot.number] = False


def staging_of(device: torch.device, shares_device: bool) -> Staging:
    """Return the staging of a rank on ``device`` for the messages to and from one other rank."""
    if device.type == "cpu":
        return Staging()
    return DeviceStaging(device) if shares_device else PinnedStaging(device)


def shares_device_memory(comm: MPI.Comm, peer: int, device: torch.device) -> bool:
    """Return whether this rank and rank ``peer`` can map each other's memory on GPUs.

    Both call it, and both share host memory.
    """
    if device.type != "cuda":
        return False
    own = torch.full((1,), comm.rank, device=device)
    torch.cuda.synchronize(device)
    return can_map(comm, peer, own)


def can_map(comm: MPI.Comm, peer: int, own: Tensor) -> bool:
    """Return whether both ranks can map the other's tensor, which contains its rank."""
    readable, memory = False, None
    with suppress(RuntimeError):  # Such as in containers that share no devices.
        memory = reduce_tensor(own)
    theirs = comm.sendrecv(memory, peer, source=peer)
    if theirs is not None:
        map_tensor, arguments = theirs
        with suppress(RuntimeError):
            readable = int(map_tensor(*arguments)) == peer
    return comm.sendrecv(readable, peer, source=peer) and readable
