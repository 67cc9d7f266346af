"""Makes the tensors of messages accessible to MPI, where they are on a GPU.

Blocks are copied to and from pinned host memory on streams of their own: the host waits for no
copy, and a kernel only for the block that it needs. That has been tested with stand-ins for streams
only, never on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Ready = Callable[[], bool]
"""Returns whether MPI may read a block; called until it may."""


class Staging(Protocol):
    """Converts blocks of messages (1-D uint8 tensors) for MPI, and back."""

    on_host: bool
    """Whether blocks may go through shared memory."""

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """The tensor that MPI reads to send ``block``, and whether it may read it yet."""

    def empty(self, size: int) -> Tensor:
        """A tensor of ``size`` bytes that MPI may write immediately."""

    def incoming(self, block: Tensor) -> Tensor:
        """The block that MPI has written, on the device and ready for the current stream."""


class HostStaging:
    """For tensors on the CPU: MPI uses their memory."""

    on_host = True

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """The block itself, immediately."""
        return block, lambda: True

    def empty(self, size: int) -> Tensor:
        """Ordinary memory."""
        return torch.empty(size, dtype=torch.uint8)

    def incoming(self, block: Tensor) -> Tensor:
        """The block itself."""
        return block


class PinnedStaging:
    """For tensors on a GPU: copies through pinned memory.

    Torch's allocator of pinned memory uses a block again only when the copies from and to it are
    done.

    Args:
        device: of the tensors.
        runtime: ``torch.cuda``.
    """

    on_host = True

    def __init__(self, device: torch.device, runtime: Any = torch.cuda) -> None:
        self._device, self._runtime = device, runtime
        self._pin = device.type == "cuda"
        self._to_host, self._to_device = runtime.Stream(device), runtime.Stream(device)

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """A copy in pinned memory, ready when the copy is done."""
        host, copied = self.empty(block.numel()), self._runtime.Event()
        self._to_host.wait_stream(self._runtime.current_stream(self._device))
        with self._runtime.stream(self._to_host):
            host.copy_(block, non_blocking=True)
            copied.record(self._to_host)

        def ready(source: Tensor = block) -> bool:  # Keeps it alive until it is copied.
            return bool(copied.query())

        return host, ready

    def empty(self, size: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def incoming(self, block: Tensor) -> Tensor:
        """A copy on the device; the current stream waits for it."""
        current = self._runtime.current_stream(self._device)
        with self._runtime.stream(self._to_device):
            arrived = block.to(self._device, non_blocking=True, copy=True)
        current.wait_stream(self._to_device)
        arrived.record_stream(current)
        return arrived


def staging(device: torch.device) -> Staging:
    """The staging for tensors on ``device``."""
    return PinnedStaging(device) if device.type == "cuda" else HostStaging()
