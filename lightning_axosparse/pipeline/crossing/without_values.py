"""Finds what a torch function returns from the shapes of its arguments, without their values.

A stage does not compute what belongs to another one. It has to know, though, what the functions
return that the step calls there, and whether they need values: ``x.shape`` and ``x.flatten(1)``
need none to be known, ``x.item()`` and ``x[x > 0]`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import (
    parsed_conversion,
    plain_torch_functions,
    tree_leaves,
    tree_map_only,
    version_of,
)

_SHOWING = (Tensor.__repr__, Tensor.__format__)
"""Functions that return values as text, also those of the meta device."""

_MOVING = (Tensor.cpu, Tensor.cuda, Tensor.to)
"""Functions that may move a tensor to another device."""

GRADIENT_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
"""Functions that ask for the gradient of a tensor, and of which each takes effect once more."""


@dataclass(frozen=True)
class Unsent:
    """Describes a tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Unsent:
        """Describe ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device.type, tensor.requires_grad)


class Outcome(NamedTuple):
    """What a function does.

    Attributes:
        result: what it returns, with a description of each tensor that it makes. An argument that
            it returns is that argument itself.
        makes_tensors: whether there are such descriptions.
        changed: the arguments that it changes in place.
    """

    result: Any
    makes_tensors: bool
    changed: tuple[Tensor, ...]

    @property
    def returns_argument(self) -> bool:
        """Whether it returns an argument, as ``contiguous`` may."""
        if isinstance(self.result, Tensor):
            return True
        return any(isinstance(leaf, Tensor) for leaf in tree_leaves(self.result))


def without_values(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Outcome | None:
    """Find what a torch function does to arguments; None if that depends on their values."""
    if func in _SHOWING:
        return None
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in given:
            # A placeholder is one number, seen with strides of zero.
            if tensor.layout is not torch.strided or 0 in tensor.stride():
                meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            else:
                meta = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                )
            given[id(tensor)] = tensor, meta.requires_grad_(tensor.requires_grad)
        return given[id(tensor)][1]

    # Inference tensors have no versions.
    with plain_torch_functions(), torch.inference_mode(False), torch.no_grad():
        try:
            standing = tree_map_only(Tensor, stand_in, (args, dict(kwargs)))
            device = _device([tensor for tensor, _ in given.values()])
            if func in _MOVING:
                result, device = _moved(func, device, *standing[0], **standing[1])
            else:
                result = func(*standing[0], **standing[1])
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None  # It reads values, or does not know the meta device.
    arguments, changed, has_gradient = {}, [], False
    with plain_torch_functions():
        for tensor, meta in given.values():
            arguments[id(meta)] = tensor
            has_gradient |= tensor.requires_grad
            if version_of(meta):
                changed.append(tensor)
    has_gradient &= torch.is_grad_enabled()

    def described(meta: Tensor) -> Tensor | Unsent:
        if id(meta) in arguments:
            return arguments[id(meta)]
        is_number = meta.is_floating_point() or meta.is_complex()
        return Unsent(meta.shape, meta.dtype, device, has_gradient and is_number)

    with plain_torch_functions():
        result = tree_map_only(Tensor, described, result)
    made = Unsent in map(type, tree_leaves(result))
    return Outcome(result, made, tuple(changed))


def _device(tensors: list[Tensor]) -> str:
    """Where the result is: a scalar on the CPU goes with tensors of any device."""
    found = [tensor for tensor in tensors if tensor.dim()] or tensors
    return found[0].device.type


def _moved(
    func: Callable[..., Any], device: str, tensor: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, str]:
    """What a function that moves a tensor returns, and the device."""
    dtype = None
    if func is Tensor.to:
        kwargs.pop("copy", None)
        wanted, dtype = parsed_conversion(*args, **kwargs)
        # A tensor that it is to be like is on the meta device, as all are here.
        device_wanted = device if wanted is None or wanted.type == "meta" else wanted.type
    else:
        device_wanted = func.__name__
    if device_wanted == device and dtype in (None, tensor.dtype):
        return tensor, device
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta"), device_wanted
