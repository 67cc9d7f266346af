"""Finds the order in which a module calls its layers, by one call without values."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_axosparse.support.torch_internals import fake_mode, tree_map_only

_log = logging.getLogger(__name__)

CallOrder = Callable[[nn.Module, Mapping[str, str]], "list[str]"]
"""What :func:`order_of_example` does."""


class Example(NamedTuple):
    """A call that calls the layers.

    Attributes:
        method: name of a method of the module.
        args: its arguments.
        kwargs: its keyword arguments.
        context: makes the context in which it runs.
    """

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def order_of_example(module: nn.Module, layers: Mapping[str, str]) -> list[str]:
    """The order in which ``forward`` calls layers with the module's ``example_input_array``.

    Args:
        module: the user's module.
        layers: name of a layer -> the container that it is in.

    Returns:
        As :func:`called_in_order`.
    """
    example = getattr(module, "example_input_array", None)
    if example is None:
        return []
    if isinstance(example, Mapping):
        return called_in_order(module, layers, Example("__call__", (), example))
    args = example if isinstance(example, tuple) else (example,)
    return called_in_order(module, layers, Example("__call__", args))


def called_in_order(module: nn.Module, layers: Mapping[str, str], example: Example) -> list[str]:
    """The order in which a call calls layers.

    A copy of the module, of fake tensors, is called. What it raises when it has called the layers,
    as a loss may that needs values, does not matter.

    Args:
        module: the user's module.
        layers: name of a layer -> the container that it is in.
        example: the call.

    Returns:
        All layers of the containers that are called at all, but for those without tensors of which
        there is not one call; an empty list where another one is not called once.
    """
    calls: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What the copy warns of, the module will warn of.
        try:
            _call(module, layers, example, calls)
        except Exception:  # The user's code may raise anything where it needs values.
            _log.debug("A call without values ended after %d layers", len(calls), exc_info=True)
    times = Counter(calls)
    containers = {layers[name] for name in calls}
    wanted = [
        name
        for name, container in layers.items()
        if container in containers and (times[name] == 1 or _has_tensors(module, name))
    ]
    called = [name for name in calls if times[name] == 1 or _has_tensors(module, name)]
    return called if sorted(called) == sorted(wanted) else []


def _call(module: nn.Module, layers: Mapping[str, str], example: Example, calls: list[str]) -> None:
    """Append to ``calls`` the layers that the example calls, in order."""
    mode = fake_mode()
    tensors = chain(module.parameters(), module.buffers())
    copied = copy.deepcopy(module, {id(each): mode.from_tensor(each) for each in tensors})
    for name in layers:
        copied.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: calls.append(name)
        )
    for name in ("log", "log_dict"):
        setattr(copied, name, lambda *_, **__: None)
    args, kwargs = tree_map_only(Tensor, mode.from_tensor, (example.args, dict(example.kwargs)))
    # Compiled layers would be compiled for fake tensors.
    with mode, example.context(), torch.compiler.set_stance("force_eager"):
        getattr(copied, example.method)(*args, **kwargs)


def _has_tensors(module: nn.Module, name: str) -> bool:
    layer = module.get_submodule(name)
    return any(True for _ in chain(layer.parameters(), layer.buffers()))
