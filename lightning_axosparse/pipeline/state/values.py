"""Copies, compares and overwrites what attributes hold: numbers, tensors, arrays, collections."""

from __future__ import annotations

import copy
import functools
import operator
import sys
import types
from collections import deque
from collections.abc import Mapping, MutableMapping
from enum import Enum
from math import inf
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from lightning_axosparse.pipeline.batch_layout import Key, children, rebuilt


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
_OPAQUE = (
    *(nn.Module, Trainer, Callback, Logger, LightningDataModule, Dataset, Sampler, type),
    *(types.ModuleType, types.FunctionType, types.MethodType, functools.partial),
)


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values on this rank, as a plain block of memory."""
    return not tensor.is_meta and tensor.layout == torch.strided and not tensor.is_quantized


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


def with_entries(value: Any, changed: Mapping[Key, Any]) -> Any:
    """A copy of a collection or a user's object that has other entries, in the same order."""
    if isinstance(value, deque):
        return type(value)(changed.values(), value.maxlen)
    if is_object(value):
        other = copy.copy(value)
        vars(other).clear()
        vars(other).update({key.value: each for key, each in changed.items()})
        return other
    if isinstance(value, MutableMapping):
        other = copy.copy(value)
        other.clear()
        for key, each in changed.items():
            other[key.value] = each
        return other
    return rebuilt(value, changed)


def copied(value: Any, objects: bool = False, depth: int = 0) -> Any:
    """A copy that does not change when the value is changed in place; parameters are not copied.

    Args:
        value: what an attribute holds.
        objects: whether users' objects are copied; else the copy holds the same ones.
        depth: how many collections hold the value.
    """
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        return _clone(value)
    of_entries = is_collection(value)
    if depth >= _DEEPEST or not (of_entries or (objects and is_object(value))):
        return value
    if isinstance(value, set) or (of_entries and is_long(value)):
        return copy.copy(value)
    made = {key: copied(each, objects, depth + 1) for key, each in entries(value).items()}
    if isinstance(value, tuple) and all(map(operator.is_, made.values(), value)):
        return value
    return with_entries(value, made)


def _clone(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if is_readable(value) else value


def detached(value: Any, depth: int = 0) -> Any:
    """The value without the graphs of its tensors."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if depth >= _DEEPEST or not is_collection(value) or is_long(value):
        return value
    held = entries(value)
    made = {key: detached(each, depth + 1) for key, each in held.items()}
    is_same = all(made[key] is each for key, each in held.items())
    return value if is_same else with_entries(value, made)


def same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are equal in all that they hold."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _same_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return _same_arrays(one, other)
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
    if isinstance(one, set) or (is_collection(one) and is_long(one)):
        return holds_same(one, other)
    here, there = entries(one), entries(other)
    return list(here) == list(there) and all(
        same(each, there[key], depth) for key, each in here.items()
    )


def holds_same(one: Any, other: Any) -> bool:
    """Whether two collections of one type hold the same objects, in the same order."""
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, Mapping):
        is_alike = list(one) == list(other)
        return is_alike and all(map(operator.is_, one.values(), other.values()))
    return len(one) == len(other) and all(map(operator.is_, one, other))


def overwrite(target: Any, value: Any) -> bool:
    """Give a tensor, an array or a collection the content of another one, in place.

    Autograd does not take it for a change.

    Args:
        target: what is overwritten.
        value: of the same kind.

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


def size_of(value: Any, depth: int = 0) -> float:
    """About how many bytes a message with this value has; infinite if it cannot be sent."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if value is None or isinstance(value, (int, float, complex, np.generic, Missing)):
        return 16
    if depth >= _DEEPEST or not is_collection(value) or is_object(value):
        return inf
    held = value if isinstance(value, set) else entries(value).values()
    return 16 + sum(size_of(each, depth + 1) for each in held)
