"""Makes the tensors of messages accessible to MPI, where they are on a GPU.

A CUDA-aware MPI reads and writes device memory. For any other MPI, blocks are copied to and from
pinned host memory on streams of their own: the host waits for no copy, and a kernel only for the
block that it needs. The GPU paths have been tested with stand-ins for streams only, never on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_axosparse.support.troubleshooting import see

_VARIABLE = "AXOSPARSE_CUDA_AWARE_MPI"

Ready = Callable[[], bool]
"""Returns whether MPI may read a block; called until it may."""


class Staging(Protocol):
    """Converts blocks of messages (1-D uint8 tensors) for MPI, and back."""

    on_host: bool
    """Whether MPI gets host memory."""

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
    """For tensors on a GPU and an MPI that needs host memory: copies through pinned memory.

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


class DeviceStaging:
    """For tensors on a GPU and a CUDA-aware MPI, which reads and writes device memory.

    Args:
        device: of the tensors.
        runtime: ``torch.cuda``.
    """

    on_host = False

    def __init__(self, device: torch.device, runtime: Any = torch.cuda) -> None:
        self._device, self._runtime = device, runtime
        self._written_by_mpi = runtime.Stream(device)

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """The block itself, ready when the current stream has computed it."""
        computed = self._runtime.Event()
        computed.record(self._runtime.current_stream(self._device))
        return block, computed.query

    def empty(self, size: int) -> Tensor:
        """Device memory that no running kernel uses."""
        # On a stream of its own, as torch reuses memory within a stream before its kernels end.
        with self._runtime.stream(self._written_by_mpi):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def incoming(self, block: Tensor) -> Tensor:
        """The block itself, not reused before the current stream has used it."""
        block = block.to(self._device)  # A block from an envelope is on the host.
        block.record_stream(self._runtime.current_stream(self._device))
        return block


def staging(device: torch.device) -> Staging:
    """The staging for tensors on ``device``."""
    if device.type != "cuda":
        return HostStaging()
    return DeviceStaging(device) if mpi_is_cuda_aware() else PinnedStaging(device)


def mpi_is_cuda_aware() -> bool:
    """Whether MPI accepts pointers to device memory. MPI has to be loaded.

    ``MPIX_Query_cuda_support`` of the library decides, unless ``AXOSPARSE_CUDA_AWARE_MPI`` is set
    to 0 or 1.

    Raises:
        ValueError: if the variable is set to anything else.
    """
    setting = os.environ.get(_VARIABLE)
    if setting is not None:
        if setting not in ("0", "1"):
            raise ValueError(
                f"{_VARIABLE} is {setting!r}. Set it to 0 or 1, or not at all."
                + see("starting-ranks")
            )
        return setting == "1"
    return any(_says_cuda_aware(library) for library in loaded_mpi_libraries())


def loaded_mpi_libraries() -> set[str]:
    """The paths of the MPI libraries in this process; none where there is no ``/proc``."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    return {path for path in paths if Path(path).name.startswith("libmpi")}


def _says_cuda_aware(library: str) -> bool:
    query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())
