"""Copies, compares and overwrites what attributes hold: numbers, tensors, arrays, collections."""

from __future__ import annotations

import copy
import functools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Mapping, MutableMapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from lightning_axosparse.distributed.gradient_reducer import DividedGradient
from lightning_axosparse.pipeline.batch_layout import Key, children
from lightning_axosparse.support.object_trees import (
    PLAIN,
    CannotPickle,
    put_together,
    take_apart,
)


class Missing(Enum):
    """Replaces the value of an attribute that there is not."""

    MISSING = "nothing"


MISSING = Missing.MISSING

# Longer collections are compared entry by entry by identity: they may be data sets.
_LONGEST = 10_000
_DEEPEST = 8
_COLLECTIONS = (list, tuple, deque, set, Mapping)
_LIBRARIES = (sys.stdlib_module_names - {"__main__", "argparse", "collections", "types"}) | {
    "lightning",
    "lightning_axosparse",
    "lightning_fabric",
    "lightning_utilities",
    "numpy",
    "omegaconf",
    "pandas",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
}
_SHARED = (nn.Module, Trainer, Callback, Logger, LightningDataModule, Dataset, Sampler)
"""Types of objects that are neither copied nor sent."""
_OPAQUE = (
    *(*_SHARED, type, types.ModuleType),
    *(types.FunctionType, types.MethodType, functools.partial),
)
_STATES: dict[type, tuple[str, str]] = {
    torch.Generator: ("get_state", "set_state"),
    np.random.RandomState: ("get_state", "set_state"),
    random.Random: ("getstate", "setstate"),
}
"""How the states of random generators are read and set."""
GENERATORS = (*_STATES, np.random.Generator)


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values on this rank, as a plain block of memory."""
    if tensor.is_meta or isinstance(tensor, DividedGradient):
        return False
    return tensor.layout == torch.strided and not tensor.is_quantized


def is_object(value: Any) -> bool:
    """Whether a value is an object of the user's, such as an average meter, that has attributes.

    Objects of libraries, data sets, callbacks and the like do not belong to a module's state.
    """
    if isinstance(value, (*_OPAQUE, *_COLLECTIONS, Tensor, np.ndarray, np.generic)):
        return False
    return not of_library(type(value)) and isinstance(getattr(value, "__dict__", None), dict)


def of_library(kind: type) -> bool:
    """Whether a class is one of Python's, torch's, Lightning's or the like."""
    return kind.__module__.partition(".")[0] in _LIBRARIES


def is_collection(value: Any) -> bool:
    """Whether a value is a collection whose entries a step may change.

    Those of OmegaConf, which Hydra makes, are configurations: they may be read-only, and have
    entries without values.
    """
    return isinstance(value, _COLLECTIONS) and type(value).__module__.split(".")[0] != "omegaconf"


def is_long(value: Any) -> bool:
    """Whether a collection is too long to look at what its entries hold."""
    return len(value) > _LONGEST


def entries(value: Any) -> dict[Key, Any]:
    """The entries of a list, tuple, deque or mapping, or the attributes of a user's object."""
    if isinstance(value, deque):
        return children(list(value))
    if is_object(value):
        return {Key(name, f".{name}"): each for name, each in vars(value).items()}
    return children(value) if is_collection(value) else {}


def copied(value: Any) -> Any:
    """A copy that does not change when the value is changed in place, or the value itself.

    Parameters, modules and the like are the same ones in it.
    """
    if isinstance(value, Tensor):
        is_own = isinstance(value, nn.Parameter) or not is_readable(value)
        return value if is_own else value.detach().clone()
    if is_collection(value) and is_long(value):
        return copy.copy(value)
    try:
        rest, taken = take_apart(value, (Tensor, *_SHARED))
    except CannotPickle:
        return value
    return put_together(rest, list(map(copied_tensor, taken)))


def copied_tensor(value: Any) -> Any:
    """A copy of a tensor; anything else as it is."""
    return copied(value) if isinstance(value, Tensor) else value


def sendable(value: Any, most_bytes: float) -> bytes | None:
    """The value for :func:`received` on another rank; None if it is larger or cannot be sent."""
    if isinstance(value, Tensor) and value.nbytes > most_bytes:
        return None
    try:
        rest, taken = take_apart(value, (Tensor, *_SHARED))
    except CannotPickle:
        return None
    tensors = [each.detach().cpu() for each in taken if isinstance(each, Tensor)]
    if len(tensors) < len(taken) or sum(tensor.nbytes for tensor in tensors) > most_bytes:
        return None
    sent = take_apart((rest, tensors), ())[0]
    return sent if len(sent) <= most_bytes else None


def received(sent: bytes, device: torch.device) -> Any:
    """What :func:`sendable` was given on another rank, with tensors on ``device``."""
    rest, tensors = put_together(sent, ())
    return put_together(rest, [tensor.to(device) for tensor in tensors])


def state_of(generator: Any) -> Any:
    """The state of a random generator."""
    for kind, (read, _) in _STATES.items():
        if isinstance(generator, kind):
            return getattr(generator, read)()
    return generator.bit_generator.state


def same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are equal in all that they hold."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _same_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other or (one != one and other != other))
    if isinstance(one, np.ndarray):
        return _same_arrays(one, other)
    if isinstance(one, GENERATORS):
        return same(state_of(one), state_of(other))
    if is_collection(one) or is_object(one):
        return depth < _DEEPEST and _same_entries(one, other, depth + 1)
    try:
        return bool(one == other) or bool(one != one and other != other)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # They cannot be compared, or have no truth, as arrays and tables of other libraries.
        return False


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if not (is_readable(one) and is_readable(other)):
        return one.is_meta and other.is_meta
    one, other = one.detach(), other.detach()
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _same_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return all(same(a, b, _DEEPEST) for a, b in zip(one.flat, other.flat, strict=True))
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


def _same_entries(one: Any, other: Any, depth: int) -> bool:
    if isinstance(one, set):
        return bool(one == other)
    if is_collection(one) and is_long(one):
        items = (one.values(), other.values()) if isinstance(one, Mapping) else (one, other)
        return len(one) == len(other) and all(map(operator.is_, *items))
    here, there = entries(one), entries(other)
    return list(here) == list(there) and all(
        same(each, there[key], depth) for key, each in here.items()
    )


def overwrite(target: Any, value: Any) -> bool:
    """Give a tensor, an array or a collection the content of another one, in place.

    Autograd does not take it for a change.

    Args:
        target: what is overwritten.
        value: of the same kind; of a random generator its state.

    Returns:
        False if that cannot be done, as with numbers and tensors of another shape.
    """
    if isinstance(target, Tensor):
        if not (isinstance(value, Tensor) and is_readable(target)):
            return False
        if target.shape != value.shape or target.dtype != value.dtype:
            return False
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.data.copy_(value)
        return True
    if isinstance(target, GENERATORS):
        _set_state(target, state_of(value) if isinstance(value, GENERATORS) else value)
        return True
    if type(target) is not type(value):
        return False
    if isinstance(target, np.ndarray):
        if target.shape != value.shape or target.dtype != value.dtype:
            return False
        target[...] = value
    elif isinstance(target, (list, set, deque, MutableMapping)):
        content = copy.copy(value)
        target.clear()
        (target.extend if isinstance(target, (list, deque)) else target.update)(content)
    else:
        return False
    return True


def _set_state(generator: Any, state: Any) -> None:
    for kind, (_, write) in _STATES.items():
        if isinstance(generator, kind):
            getattr(generator, write)(state)
            return
    generator.bit_generator.state = state
