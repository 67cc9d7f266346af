"""Staging: where the bytes of a message lie for MPI, if its tensors are on a GPU.

MPI reads and writes device memory where it is CUDA-aware. Elsewhere a block is copied to and from
pinned host memory, on streams beside the step's, so that the host waits for no copy and a kernel
only for the block that it needs. The GPU paths have been tested with stand-ins for streams alone,
never on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_VARIABLE = "AXOSPARSE_CUDA_AWARE_MPI"

Ready = Callable[[], bool]
"""Whether MPI may read a block; asked until it may."""


class Staging(Protocol):
    """Gives MPI the blocks of messages, 1-D uint8 tensors, and takes them from it."""

    on_host: bool
    """Whether MPI is given host memory."""

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """What MPI is to read for a block on the device, and from when on."""

    def empty(self, size: int) -> Tensor:
        """Memory of ``size`` bytes that MPI may write at once."""

    def incoming(self, block: Tensor) -> Tensor:
        """The block on the device, to be used by the current stream, after MPI has written it."""


class HostStaging:
    """Tensors on the CPU stay where they are."""

    on_host = True

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """The block itself, now."""
        return block, lambda: True

    def empty(self, size: int) -> Tensor:
        """Any memory."""
        return torch.empty(size, dtype=torch.uint8)

    def incoming(self, block: Tensor) -> Tensor:
        """The block itself."""
        return block


class PinnedStaging:
    """Blocks on a GPU go through pinned host memory.

    Torch keeps pinned memory that is free for the next who asks for it, and holds it back until
    the copies that use it are done.

    Args:
        device: of the tensors.
        runtime: ``torch.cuda``.
    """

    on_host = True

    def __init__(self, device: torch.device, runtime: Any = torch.cuda) -> None:
        self._device, self._runtime = device, runtime
        self._pins = device.type == "cuda"
        self._leaving, self._arriving = runtime.Stream(device), runtime.Stream(device)

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """A copy in pinned memory, from when the copying is done."""
        host, copied = self.empty(block.numel()), self._runtime.Event()
        self._leaving.wait_stream(self._runtime.current_stream(self._device))
        with self._runtime.stream(self._leaving):
            host.copy_(block, non_blocking=True)
            copied.record(self._leaving)

        def ready(source: Tensor = block) -> bool:  # It must live until it has been copied.
            return bool(copied.query())

        return host, ready

    def empty(self, size: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)

    def incoming(self, block: Tensor) -> Tensor:
        """A copy on the device, for which the current stream waits."""
        current = self._runtime.current_stream(self._device)
        with self._runtime.stream(self._arriving):
            arrived = block.to(self._device, non_blocking=True, copy=True)
        current.wait_stream(self._arriving)
        arrived.record_stream(current)
        return arrived


class DeviceStaging:
    """A CUDA-aware MPI reads and writes device memory.

    Args:
        device: of the tensors.
        runtime: ``torch.cuda``.
    """

    on_host = False

    def __init__(self, device: torch.device, runtime: Any = torch.cuda) -> None:
        self._device, self._runtime = device, runtime
        self._written_by_mpi = runtime.Stream(device)

    def outgoing(self, block: Tensor) -> tuple[Tensor, Ready]:
        """The block itself, from when the current stream has computed it."""
        computed = self._runtime.Event()
        computed.record(self._runtime.current_stream(self._device))
        return block, computed.query

    def empty(self, size: int) -> Tensor:
        """Device memory that no kernel under way uses."""
        # A stream of its own: torch hands freed memory on within a stream before its kernels end.
        with self._runtime.stream(self._written_by_mpi):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def incoming(self, block: Tensor) -> Tensor:
        """The block itself, held back until the current stream has used it."""
        block = block.to(self._device)  # What came in an envelope is on the host.
        block.record_stream(self._runtime.current_stream(self._device))
        return block


def staging(device: torch.device) -> Staging:
    """How messages of tensors on ``device`` reach MPI and come from it."""
    if device.type != "cuda":
        return HostStaging()
    return DeviceStaging(device) if mpi_is_cuda_aware() else PinnedStaging(device)


def mpi_is_cuda_aware() -> bool:
    """Whether MPI takes pointers to device memory.

    It is asked itself, by ``MPIX_Query_cuda_support``, unless ``AXOSPARSE_CUDA_AWARE_MPI`` is set
    to 0 or 1. Call it after MPI has been loaded.

    Raises:
        ValueError: if the variable is set to anything else.
    """
    wish = os.environ.get(_VARIABLE)
    if wish is not None:
        if wish not in ("0", "1"):
            raise ValueError(f"{_VARIABLE} is {wish!r}. Set it to 0 or 1, or not at all.")
        return wish == "1"
    return any(_says_cuda_aware(library) for library in _loaded_mpi_libraries())


def _loaded_mpi_libraries() -> set[str]:
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    return {path for path in paths if Path(path).name.startswith("libmpi")}


def _says_cuda_aware(library: str) -> bool:
    query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())
