"""Finds the order in which a module calls its containers of layers, by one call without values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn

from lightning_axosparse.support.torch_internals import fake_mode, tree_map_only


def called_in_order(module: nn.Module, containers: Mapping[str, nn.Module]) -> list[str]:
    """The containers that a module calls, in the order in which it calls them.

    A copy of the module, of fake tensors, computes its ``example_input_array``.

    Args:
        module: the user's module.
        containers: by name, containers of the module, none inside another.

    Returns:
        The names; an empty list where the order is not plain: without an example, where ``forward``
        needs values, and where layers are not called once each, container by container.
    """
    example = getattr(module, "example_input_array", None)
    if example is None:
        return []
    layers = {
        f"{path}.{key}": path
        for path, container in containers.items()
        for key, _ in container.named_children()
    }
    try:
        called = _calls(module, example, list(layers))
    except Exception:  # The user's code may raise anything where it needs values.
        return []
    in_turn = [path for path, _ in groupby(called, layers.__getitem__)]
    whole = [name for path in in_turn for name in layers if layers[name] == path]
    return in_turn if called == whole else []


def _calls(module: nn.Module, example: Any, layers: list[str]) -> list[str]:
    """The layers that ``forward`` calls, in order."""
    calls: list[str] = []
    mode = fake_mode()
    tensors = chain(module.parameters(), module.buffers())
    copied = copy.deepcopy(module, {id(each): mode.from_tensor(each) for each in tensors})
    for name in layers:
        copied.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: calls.append(name)
        )
    example = tree_map_only(Tensor, mode.from_tensor, example)
    # Compiled layers would be compiled for fake tensors.
    with mode, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        if isinstance(example, Mapping):
            copied(**example)
        else:
            copied(*(example if isinstance(example, tuple) else (example,)))
    return calls
