"""Validates arguments of public functions by rules in a decorator of the function."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.support.troubleshooting import see

P = ParamSpec("P")
R = TypeVar("R")

_MAX_LENGTH = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Kind:
    """The values that an argument may have; ``|`` joins two kinds.

    Attributes:
        wanted: what the value must be, in words.
        fits: whether a value is of this kind; raises no exception for any value.
    """

    wanted: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(
            f"{self.wanted}, or {other.wanted}",
            lambda value: self.fits(value) or other.fits(value),
        )


_LARGEST = 2**31 - 1


def integer(low: int, high: int = _LARGEST) -> Kind:
    """Integers from ``low`` to ``high``; a bool is no integer here."""
    wanted = f"{low} or more" if high >= _LARGEST else f"from {low} to {high}"
    return Kind(
        f"a whole number, {wanted}",
        lambda value: type(value) is int and low <= value <= high,
    )


def number(wanted: str, fits: Callable[[float], bool]) -> Kind:
    """Integers and floats for which ``fits`` is true; it should be false for NaN."""
    return Kind(wanted, lambda value: type(value) in (int, float) and fits(value))


def one_of(*choices: str) -> Kind:
    """Strings that are one of ``choices``."""
    return Kind(
        " or ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices
    )


def instance_of(wanted: str, *types: type) -> Kind:
    """Objects of one of ``types``."""
    return Kind(wanted, lambda value: isinstance(value, types))


def list_of(wanted: str, kind: Kind) -> Kind:
    """Lists, tuples, sets and other collections whose entries are all of ``kind``."""
    return Kind(
        wanted,
        lambda value: (
            isinstance(value, Collection)
            and not isinstance(value, (str, bytes, Mapping, Tensor))
            and all(map(kind.fits, value))
        ),
    )


def sequence_of(wanted: str, kind: Kind) -> Kind:
    """Lists and tuples with at least one entry, all of ``kind``."""
    entries = list_of(wanted, kind)
    return Kind(
        wanted, lambda value: isinstance(value, Sequence) and len(value) > 0 and entries.fits(value)
    )


COUNT = integer(1)
INDEX = integer(0)
SEED = integer(0, 2**32 - 1)
NOT_NEGATIVE = number("a finite number, at least 0", lambda value: 0 <= value < float("inf"))
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
NONE = Kind("None", lambda value: value is None)
BOOL = instance_of("True or False", bool)
FUNCTION = Kind("a function", callable)
TEXT = Kind("a text that is not empty", lambda value: isinstance(value, str) and value != "")
PATH = TEXT | instance_of("a path", os.PathLike)
NAMES = sequence_of("names, such as ['stem', 'layer1']", TEXT)
LAYERS = sequence_of("the number of layers of each stage, such as [3, 5]", COUNT)
MODULE = instance_of("an nn.Module", nn.Module)
OPTIMIZER = instance_of("a torch Optimizer", Optimizer)
DISTANCES = Kind(
    "a mapping of optimizer steps to distances",
    lambda value: (
        isinstance(value, Mapping)
        and all(INDEX.fits(step) for step in value)
        and all(NOT_NEGATIVE.fits(distance) for distance in value.values())
    ),
)
MASKS = instance_of("a mapping of parameter names to bool tensors, such as `ticket.masks`", Mapping)


def checked(error: type[Exception], **kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to validate the named arguments of each call; defaults are not checked.

    NumPy's numbers and arrays become Python's numbers and lists. Values of another kind raise
    ``error``. With ``@checked(ValueError, n=COUNT)``, the call ``f(n=0)`` raises "n=0 must be a
    whole number, 1 or more."
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            given = {name: bound.arguments[name] for name in kinds if name in bound.arguments}
            bound.arguments.update(check(error, given, kinds))
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def check(
    error: type[Exception], values: Mapping[str, Any], kinds: Mapping[str, Kind]
) -> dict[str, Any]:
    """Validate named values, and raise ``error`` for the first that is not of its kind.

    Returns:
        name -> value, in which NumPy's numbers and arrays are Python's numbers and lists.
    """
    converted = {name: _without_numpy(value) for name, value in values.items()}
    for name, value in converted.items():
        if not kinds[name].fits(value):
            raise error(
                f"{name}={short_repr(values[name])} must be {kinds[name].wanted}."
                + see("arguments")
            )
    return converted


def check_fields(error: type[Exception], values: Any, **kinds: Kind) -> None:
    """Validate fields of a frozen dataclass, as :func:`check` does, in its ``__post_init__``."""
    for name, value in check(error, {name: getattr(values, name) for name in kinds}, kinds).items():
        object.__setattr__(values, name, value)


def short_repr(value: object) -> str:
    """Return a value as one line that is short enough for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def validate_mask(name: str, mask: object) -> None:
    """Raise a ValueError unless a mask is a dense bool tensor with values."""
    if not isinstance(mask, Tensor):
        actual = f"{type(mask).__name__}: {short_repr(mask)}"
    elif mask.dtype != torch.bool:
        actual = f"one of {mask.dtype}"
    elif mask.layout != torch.strided:
        actual = f"one of {mask.layout}; take mask.to_dense()"
    elif mask.is_meta:
        actual = "one on the meta device, which has no values"
    else:
        return
    raise ValueError(
        f"The mask of {short_repr(name)} must be a dense bool tensor, not {actual}."
        + see("arguments")
    )


def _without_numpy(value: Any) -> Any:
    """Convert NumPy's numbers and arrays, also in lists and tuples, and its numbers in dicts."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_without_numpy(entry) for entry in value]
    if isinstance(value, dict):
        return {_number(key): _number(entry) for key, entry in value.items()}
    return value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
