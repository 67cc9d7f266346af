"""Compiles loops with numba, and says so where that takes a user's time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numba
from numba.core import event

from lightning_axosparse.support.messages import rank_zero_info

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop for the types that it is called with; numba keeps it in a file."""
    loop: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return loop


def compilation_said() -> AbstractContextManager[Any]:
    """Say once in the context that loops are compiled, if numba does not find them in its files."""
    listener: Any = _Said()
    context: AbstractContextManager[Any] = event.install_listener("numba:compile", listener)
    return context


class _Said(event.Listener):
    """Says at the first compilation that there is one."""

    said = False

    def on_start(self, event: Any) -> None:
        if not self.said:
            rank_zero_info("Compiling loops for sparse weights: only the first time on a machine.")
        self.said = True

    def on_end(self, event: Any) -> None:
        """Say nothing."""
