"""Replaces an attribute of an object, or the ``forward`` of a module but not of its copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def patched(owner: object, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the context; after it the owner has its own again, if it had one."""
    own = {key: vars(owner)[key] for key in vars(owner).keys() & {name}}
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, own[name])
        else:
            delattr(owner, name)


Forward = Callable[..., Any]


@contextmanager
def replaced_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> Iterator[None]:
    """Replace the ``forward`` of a module inside the context.

    Copies of the module, pickled ones too, have its own ``forward``: what replaces it refers to the
    original's weights.

    Args:
        module: the module.
        make: returns what replaces its own ``forward``, which it is given.
    """
    attributes = vars(module)  # A scripted module lets nobody set others.
    own = {key: attributes[key] for key in attributes.keys() & {"forward"}}
    attributes["forward"] = _Replacement(module, make)
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(own)


class _Replacement(partial[Any]):
    """What stands in a module in place of its own ``forward``."""

    _module: nn.Module
    _given: Forward | None

    def __new__(cls, module: nn.Module, make: Callable[[Forward], Forward]) -> _Replacement:
        given = vars(module).get("forward")
        replacement = super().__new__(cls, make(given or partial(_own_forward, module)))
        replacement._module, replacement._given = module, given
        return replacement

    def __reduce__(self) -> Any:
        if self._given is not None:
            return _same, (self._given,)
        return partial, (_own_forward, self._module)


def _own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The class's is looked up in each call: `sparsify` changes the class.
    return type(module).forward(module, *args, **kwargs)


def _same(value: Any) -> Any:
    return value
