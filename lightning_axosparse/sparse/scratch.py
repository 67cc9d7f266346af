"""Scratch: memory that one thread uses again and again for what lives within one function.

Fresh memory costs page faults: they, and not the scatter, were most of the time that making a
weight dense took on CPU. Whoever takes scratch must not let it escape: it is for tensors of our own
that are handed only to operators whose result never aliases their inputs (products, gathers,
scatters).
"""

from __future__ import annotations

import threading
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Use = Literal["tile", "positions"]
"""What scratch is for; two uses never share memory."""


class _Scratch(threading.local):
    """One buffer for each use, of this thread alone."""

    def __init__(self) -> None:
        self._buffers: dict[Use, Tensor] = {}
        self._typed: dict[tuple[Use, torch.dtype], Tensor] = {}

    def take(self, use: Use, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised 1-D tensor, valid until the next call of this thread for this ``use``.

        On other devices than the CPU it is a fresh one: their allocators keep freed memory anyway,
        and know which stream still uses it.
        """
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        typed = self._typed.get((use, dtype))
        if typed is None or typed.numel() < numel:
            # A tensor made in inference mode could not be written outside it. Modes that watch what
            # operators make, as those that count activations, are not to see what stays anyway.
            with torch.inference_mode(False), _disable_current_modes():
                typed = self._buffer(use, numel * dtype.itemsize).view(dtype)
            self._typed[use, dtype] = typed
        return typed[:numel]

    @property
    def nbytes(self) -> int:
        """Bytes that this thread has."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give this thread's memory back."""
        self._buffers.clear()
        self._typed.clear()

    def _buffer(self, use: Use, size: int) -> Tensor:
        """At least ``size`` bytes, which entries of any dtype fill."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < size:
            self._typed = {key: typed for key, typed in self._typed.items() if key[0] != use}
            buffer = torch.empty(-(-size // 16) * 16, dtype=torch.uint8, device="cpu")
            self._buffers[use] = buffer
        return buffer


scratch = _Scratch()
"""The scratch of the calling thread."""
