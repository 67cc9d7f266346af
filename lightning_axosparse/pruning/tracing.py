"""Traces a network with :mod:`torch.fx`, without an input, into modules of the user.

The tensors of the network may be on the meta device.
"""

from __future__ import annotations

from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import fx, nn

from lightning_axosparse.support.troubleshooting import see

_UNTRACEABLE = TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError
"""Errors of code that reads the value of an ``fx.Proxy``; fx's ``TraceError`` is a ValueError."""


class _Tracer(fx.Tracer):
    """Traces into modules of the user, but for those that cannot be traced."""

    def __init__(self, known: dict[int, bool]) -> None:
        super().__init__()
        self._known = known

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_known = super().is_leaf_module(m, module_qualified_name)
        return is_known or has_hooks(m) or not self._can_trace(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        # Not the forward of the instance: a pipeline replaces that of its layers.
        return super().call_module(m, partial(type(m).forward, m), args, kwargs)

    def _can_trace(self, module: nn.Module) -> bool:
        if id(module) not in self._known:
            try:
                _Tracer(self._known).trace(module, _defaults(module))
                self._known[id(module)] = True
            except _UNTRACEABLE:
                self._known[id(module)] = False
        return self._known[id(module)]


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks may change what a module reads or returns, which tracing does not see."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Return the defaults of ``forward``'s arguments, which may decide which code runs."""
    parameters = signature(type(module).forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not Parameter.empty}


def trace(part: nn.Module) -> fx.Graph:
    """Trace a network; modules that cannot be traced, or have hooks, are leaves of the graph.

    Raises:
        ValueError: if the ``forward`` of the network itself cannot be traced.
    """
    try:
        return _Tracer({}).trace(part, _defaults(part))
    except Exception as error:
        raise ValueError(
            f"The forward of {type(part).__name__} cannot be traced ({error}). Name a part of the "
            "module that holds its convolutions and can be traced, such as network='model'."
            + see("channels")
        ) from error


def asks_for_type(node: fx.Node) -> bool:
    """Return whether a call asks for the dtype or the device of a tensor alone."""
    return node.target is getattr and node.args[1] in ("dtype", "device")
