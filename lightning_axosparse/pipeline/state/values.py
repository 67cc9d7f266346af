"""Copies, compares and overwrites values of attributes, and tells which ones an operator writes."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from lightning_axosparse.distributed.gradient_reducer import DividedGradient
from lightning_axosparse.pipeline.crossing.placeholder import Placeholder
from lightning_axosparse.support.object_trees import CannotPickle, put_together, take_apart
from lightning_axosparse.support.torch_internals import mutated_tensors, tensors_in

T = TypeVar("T")


class MISSING:
    """Stands for the value of an attribute that does not exist."""


PathStep = tuple[str, Any]
"""An attribute's name after ".", or the key of an entry after "[]"."""

_DEEPEST, _LONGEST = 8, 10_000
_LIBRARIES = (sys.stdlib_module_names - {"__main__", "argparse", "collections", "types"}) | {
    *("lightning", "lightning_axosparse", "lightning_fabric", "lightning_utilities"),
    *("numpy", "omegaconf", "pandas", "pytorch_lightning", "torch", "torchmetrics"),
}
SHARED = (nn.Module, Trainer, Callback, Logger, LightningDataModule, Dataset, Sampler)
"""Types of objects that are neither copied nor sent."""
_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
"""The functions that read and set the state of each kind of random generator."""
COLLECTIONS, GENERATORS = (list, deque, set, dict), tuple(_STATES)
MUTABLE = (*COLLECTIONS, *GENERATORS, Tensor, np.ndarray)
"""Types of values that can be changed in place, besides objects with attributes."""


_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
}
"""Operators that write running statistics, which their schemas do not say."""


def cached_by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Cache the results of a function of a class, as long as the class exists."""
    known: WeakKeyDictionary[type, T] = WeakKeyDictionary()

    @wraps(function)
    def cached(kind: type) -> T:
        if kind not in known:
            known[kind] = function(kind)
        return known[kind]

    return cached


@cached_by_class
def of_library(kind: type) -> bool:
    """Whether a class is one of Python's, torch's, Lightning's or the like."""
    return kind.__module__.partition(".")[0] in _LIBRARIES


@cached_by_class
def has_attributes(kind: type) -> bool:
    """Whether a class is the user's and its objects have a state, such as an average meter.

    Objects of libraries, data sets, callbacks and the like do not belong to a module's state.
    """
    is_other = of_library(kind) or issubclass(kind, (*SHARED, *MUTABLE, tuple))
    return bool(kind.__dictoffset__) and not is_other


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values on this rank, as a plain block of memory."""
    if tensor.is_meta or isinstance(tensor, DividedGradient | Placeholder):
        return False
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def written_tensors(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors to which an operator writes."""
    if operator in _BATCH_NORMS:
        running, is_training = args[3:5], args[5]
        return tensors_in(running) if is_training else []
    return mutated_tensors(operator, args, kwargs)


def entries(value: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a list, tuple, deque or dict, or an object's attributes.

    None for any other value, and for a collection that is so long that it may be a data set.
    """
    if isinstance(value, (list, tuple, deque, dict)):
        if len(value) > _LONGEST:
            return None
        return value if isinstance(value, dict) else dict(enumerate(value))
    kind: type = type(value)
    return vars(value) if has_attributes(kind) else None


def content_of(value: Any) -> Any:
    """Copy the content of a value that can be changed in place, for :func:`overwrite`."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return _state_calls(value)[0](value) if isinstance(value, GENERATORS) else copy.copy(value)


def copied(value: Any) -> Any:
    """Copy a value so that changes in place do not reach the copy.

    Tensors with a graph, parameters and modules inside a value, and values that cannot be pickled
    are not copied.
    """
    if isinstance(value, Tensor):
        if not is_readable(value) or value.grad_fn is not None:
            return value
        tensor = value.detach().clone()
        if isinstance(value, nn.Parameter):
            tensor = nn.Parameter(tensor, value.requires_grad)
            vars(tensor).update(vars(value))  # such as the full shape of a split weight
        return tensor
    try:
        rest, taken = take_apart(value, (Tensor, *SHARED))
    except CannotPickle:
        return value
    shared = (nn.Parameter, *SHARED)
    return put_together(rest, [e if isinstance(e, shared) else copied(e) for e in taken])


def same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are equal, with all their entries and attributes; NaN equals NaN."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return _fits(one, other) and one.tobytes() == other.tobytes()
    if isinstance(one, GENERATORS):
        one, other = content_of(one), content_of(other)
    here, there = entries(one), entries(other)
    if here is not None and there is not None:
        pairs = zip(here.values(), there.values(), strict=False)
        is_alike = depth < _DEEPEST and list(here) == list(there)
        return is_alike and all(same(*pair, depth + 1) for pair in pairs)
    try:
        return bool(one == other) or bool(one != one and other != other)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # They cannot be compared, or the result has no truth value: tables of other libraries.
        return False


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if not (is_readable(one) and is_readable(other)):
        return one.is_meta and other.is_meta and _fits(one, other)
    if not _fits(one, other) or one.device != other.device:
        return False
    one, other = one.detach(), other.detach()
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def overwrite(target: Any, value: Any) -> bool:
    """Copy the content of a value into a tensor, an array, a collection or a generator.

    Autograd does not count it as a change.

    Returns:
        False where that is impossible, as for numbers and tensors of another shape.
    """
    if isinstance(target, GENERATORS):
        state = content_of(value) if isinstance(value, GENERATORS) else value
        _state_calls(target)[1](target, state)
    elif isinstance(target, Tensor):
        if not (isinstance(value, Tensor) and is_readable(target) and _fits(target, value)):
            return False
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.data.copy_(value)
    elif type(target) is not type(value):
        return False
    elif isinstance(target, np.ndarray) and _fits(target, value):
        target[...] = value
    elif isinstance(target, COLLECTIONS):
        content = copy.copy(value)
        target.clear()
        (target.extend if isinstance(target, (list, deque)) else target.update)(content)
    else:
        return False
    return True


def _fits(target: Any, value: Any) -> bool:
    return bool(target.shape == value.shape and target.dtype == value.dtype)


def _state_calls(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(calls for kind, calls in _STATES.items() if isinstance(generator, kind))
