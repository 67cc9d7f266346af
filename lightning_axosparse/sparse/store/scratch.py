"""Reuses one buffer per thread for tiles, positions and operands that a single function needs.

New memory causes page faults, which took longer than the scatter when a weight was materialized on
CPU. A tensor in scratch memory must not leave the function that took it: pass it only to operators
whose result never aliases their inputs (products, gathers, scatters).
"""

from __future__ import annotations

import threading
from typing import Literal

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import without_dispatch_modes

Use = Literal["tile", "positions", "packed", "transpose", "rounded"]
"""The uses of scratch memory; two uses never share a buffer."""


class _Scratch(threading.local):
    """One buffer per use, for this thread alone."""

    def __init__(self) -> None:
        self._buffers: dict[Use, Tensor] = {}
        self._typed: dict[tuple[Use, torch.dtype], Tensor] = {}

    def take(self, use: Use, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized 1-D tensor, valid until this thread's next call for this ``use``.

        On other devices than the CPU it is a new tensor: their allocators cache freed memory and
        track the streams that use it.
        """
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        typed = self._typed.get((use, dtype))
        if typed is None or typed.numel() < numel:
            # A tensor created in inference mode could not be written outside it. Dispatch modes
            # that count activations must not count memory that stays allocated.
            with torch.inference_mode(False), without_dispatch_modes():
                typed = self._buffer(use, numel * dtype.itemsize).view(dtype)
            self._typed[use, dtype] = typed
        return typed[:numel]

    def clear(self) -> None:
        """Free this thread's memory."""
        self._buffers.clear()
        self._typed.clear()

    def _buffer(self, use: Use, size: int) -> Tensor:
        """Return a buffer of at least ``size`` bytes, a multiple of every dtype's size."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < size:
            self._typed = {key: typed for key, typed in self._typed.items() if key[0] != use}
            buffer = torch.empty(-(-size // 16) * 16, dtype=torch.uint8, device="cpu")
            self._buffers[use] = buffer
        return buffer


# Global, but every thread sees only its buffers.
scratch = _Scratch()
"""The scratch memory of the calling thread."""
