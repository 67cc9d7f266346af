"""The states of the global generators of random numbers, to be restored and compared."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

from lightning_axosparse.support.torch_internals import tree_leaves


class Generators:
    """The present states of the global generators of torch, NumPy and Python; can be pickled.

    Args:
        device: device of this rank, whose generator is included besides the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch = torch.get_rng_state()
        is_cuda = device.type == "cuda"
        self._cuda = torch.cuda.get_rng_state(device) if is_cuda else None
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)
        # Reading and writing NumPy's state takes 0.1 ms each, and comparing its memory 1 us. Where
        # a normal number of the last pair is left, a draw may take that, and nothing else changes.
        self._numpy_memory = b"" if self._numpy.get("has_gauss") else _numpy_memory()

    def restore(self, device: torch.device) -> None:
        """Restore these states."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, device)
        random.setstate(self._python)
        if not self._numpy_memory or self._numpy_memory != _numpy_memory():
            np.random.set_state(self._numpy)

    def match_python_and_numpy(self) -> bool:
        """Whether Python's and NumPy's generators have these states now."""
        if self._python != random.getstate():
            return False
        if self._numpy_memory:
            return self._numpy_memory == _numpy_memory()
        return _equal(self._numpy, np.random.get_state(legacy=False))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Generators)
            and self._python == other._python
            and _equal(self._numpy, other._numpy)
            and torch.equal(self._torch, other._torch)
            and (self._cuda is None or other._cuda is None or torch.equal(self._cuda, other._cuda))
        )

    __hash__ = None  # type: ignore[assignment]


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of NumPy's generator are equal."""
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


_Memory = ctypes.c_char * (625 * 4)


def _numpy_memory() -> bytes:
    """Return the memory of NumPy's global generator; empty if it is not the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return b""
    # Its 624 numbers and its place among them.
    return _Memory.from_address(generator.ctypes.state_address).raw
