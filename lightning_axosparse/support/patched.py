"""Replaces attributes, the ``forward`` of a module but not of its copies, or kernels of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def patched(owner: object, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the context; then restore the owner's own, or remove it."""
    own = {key: vars(owner)[key] for key in vars(owner).keys() & {name}}
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, own[name])
        else:
            delattr(owner, name)


@contextmanager
def kernels_replaced(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace torch's CPU kernels of operators inside the context.

    Args:
        kernels: operator of ``aten`` -> its kernel, which is called with torch's own, the dispatch
            keys, which torch's own takes, and the operator's arguments.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            own = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, partial(kernel, own), "CPU", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        del library  # This restores torch's own kernels.


Forward = Callable[..., Any]


@contextmanager
def replaced_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> Iterator[None]:
    """Replace the ``forward`` of a module inside the context.

    Copies of the module, also pickled ones, have the module's own ``forward``, as the replacement
    refers to the weights of the original.

    Args:
        module: the module.
        make: called with the module's own ``forward``; returns the replacement.
    """
    attributes = vars(module)  # A scripted module refuses `setattr`.
    own = {key: attributes[key] for key in attributes.keys() & {"forward"}}
    attributes["forward"] = _Replacement(module, make)
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(own)


class _Replacement(partial[Any]):
    """A function that replaces a module's ``forward``, and is pickled as the module's own."""

    _module: nn.Module
    _instance_forward: Forward | None
    """The ``forward`` that was an attribute of the instance, if there was one."""

    def __new__(cls, module: nn.Module, make: Callable[[Forward], Forward]) -> _Replacement:
        instance_forward = vars(module).get("forward")
        replacement = super().__new__(cls, make(instance_forward or partial(_forward, module)))
        replacement._module, replacement._instance_forward = module, instance_forward
        return replacement

    def __reduce__(self) -> Any:
        if self._instance_forward is not None:
            return _identity, (self._instance_forward,)
        return partial, (_forward, self._module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Looked up in the class at each call, as `sparsify` changes the class.
    return type(module).forward(module, *args, **kwargs)


def _identity(value: Any) -> Any:
    return value
