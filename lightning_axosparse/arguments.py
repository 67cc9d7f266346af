"""Arguments: what an argument may be, told beside each signature; anything else is refused."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")

_SHOWN = 80
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class Kind:
    """The values that an argument may have; ``|`` joins two kinds.

    Attributes:
        wanted: what the value must be, in words.
        fits: whether a value is of the kind; raises nothing, whatever it is given.
    """

    wanted: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(
            f"{self.wanted}, or {other.wanted}",
            lambda value: self.fits(value) or other.fits(value),
        )


def whole(low: int, high: int = 2**31 - 1) -> Kind:
    """Whole numbers, both ends included. A bool is none: it says yes or no, not how many."""
    return Kind(
        f"a whole number from {low} to {high}",
        lambda value: type(value) is int and low <= value <= high,
    )


def number(wanted: str, fits: Callable[[float], bool]) -> Kind:
    """Whole numbers and floats, of which ``fits`` decides; it should be false for NaN."""
    return Kind(wanted, lambda value: type(value) in (int, float) and fits(value))


def one_of(*choices: str) -> Kind:
    """Some words."""
    return Kind(
        " or ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices
    )


def instance_of(wanted: str, *types: type) -> Kind:
    """Objects of one of some types."""
    return Kind(wanted, lambda value: isinstance(value, types))


def list_of(wanted: str, kind: Kind) -> Kind:
    """Lists, tuples, sets and the like whose entries are all of one kind."""
    return Kind(
        wanted,
        lambda value: (
            isinstance(value, Collection)
            and not isinstance(value, (str, bytes, Mapping, Tensor))
            and all(map(kind.fits, value))
        ),
    )


COUNT = whole(1)
INDEX = whole(0)
BYTES = whole(1, 2**63 - 1)
SEED = whole(0, 2**32 - 1)
NOT_NEGATIVE = number("a finite number, at least 0", lambda value: 0 <= value < float("inf"))
TIMEOUT = number("a number of seconds above 0", lambda value: value > 0) | Kind(
    "a datetime.timedelta above 0",
    lambda value: isinstance(value, timedelta) and value > timedelta(0),
)
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
NONE = Kind("None", lambda value: value is None)
BOOL = instance_of("True or False", bool)
FUNCTION = Kind("a function", callable)
TEXT = Kind("a text that is not empty", lambda value: isinstance(value, str) and value != "")
PATH = TEXT | instance_of("a path", os.PathLike)
PATTERNS = list_of("a list of patterns, such as ['head.*']", TEXT)
LAYERS = Kind(
    "the number of layers of each stage, such as [3, 5]",
    lambda value: isinstance(value, Sequence) and len(value) > 0 and list_of("", COUNT).fits(value),
)
MODULE = instance_of("an nn.Module", nn.Module)
OPTIMIZER = instance_of("a torch Optimizer", Optimizer)
MASKS = instance_of("a mapping of parameter names to bool tensors", Mapping)


def checked(error: type[Exception], **kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the named arguments of a function whenever it is called.

    numpy's numbers and arrays arrive in the function as Python's numbers and lists.

    Args:
        error: what to raise for a value that does not fit.
        kinds: the kind of each argument. Defaults are not checked.
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
    """The values, with Python's numbers for numpy's.

    Args:
        error: what to raise for the first value that does not fit.
        values: name -> value.
        kinds: name -> kind, for each name in ``values``.
    """
    plain = {name: _plain(value) for name, value in values.items()}
    for name, value in plain.items():
        if not kinds[name].fits(value):
            raise error(f"{name}={shown(values[name])} must be {kinds[name].wanted}.")
    return plain


def shown(value: object) -> str:
    """The value in one line that is not too long for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def refuse_mask(name: str, mask: object) -> None:
    """Refuse what does not tell of each entry of a parameter whether it is kept.

    Args:
        name: the parameter's.
        mask: should be a dense bool tensor, on any device that has memory.

    Raises:
        ValueError: naming the parameter and what is there instead.
    """
    if not isinstance(mask, Tensor):
        found = f"{type(mask).__name__}: {shown(mask)}"
    elif mask.dtype != torch.bool:
        found = f"one of {mask.dtype}"
    elif mask.layout != torch.strided:
        found = f"one of {mask.layout}; take mask.to_dense()"
    elif mask.is_meta:
        found = "one on the meta device, which has no values"
    else:
        return
    raise ValueError(f"The mask of {shown(name)} must be a dense bool tensor, not {found}.")


def _plain(value: Any) -> Any:
    """Python's number for numpy's; so in lists and tuples."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
