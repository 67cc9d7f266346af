"""Compiles loops with numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop for the types that it is called with; numba keeps it in a file."""
    loop: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return loop
