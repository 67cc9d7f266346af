"""Replaces the ``forward`` of a module without replacing that of its copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class ReplacedForward:
    """What stands in a module in place of its own ``forward``, until :meth:`remove`.

    Copies of the module, pickled ones too, have its own ``forward``: what replaces it refers to the
    original's weights.

    Args:
        module: the module.
        make: returns what replaces its own ``forward``, which it is given.
    """

    def __init__(self, module: nn.Module, make: Callable[[Forward], Forward]) -> None:
        self._module, self._given = module, vars(module).get("forward")
        self._call = make(self._given or partial(_own_forward, module))
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what replaces ``forward``."""
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its own ``forward`` back."""
        del vars(self._module)["forward"]
        if self._given is not None:
            vars(self._module)["forward"] = self._given

    def __reduce__(self) -> Any:
        if self._given is not None:
            return _same, (self._given,)
        return partial, (_own_forward, self._module)


def _own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The class's is looked up in each call: `sparsify` changes the class.
    return type(module).forward(module, *args, **kwargs)


def _same(value: Any) -> Any:
    return value
