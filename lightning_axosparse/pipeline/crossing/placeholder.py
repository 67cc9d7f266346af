"""Replaces tensors that are not sent from stage to stage.

Code of the step that belongs to an earlier stage may do with a placeholder what it likes: it gets
placeholders back. Code that this stage computes needs values, so a torch function that takes a
placeholder there raises an error, which names what was not sent. Whether a function needs values is
seen by calling it on the meta device: ``x.shape`` and ``x.flatten(1)`` need none, ``x.item()`` and
``x[x > 0]`` do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_axosparse.support.object_trees import object_leaves, object_map
from lightning_axosparse.support.torch_internals import (
    parse_conversion,
    plain_torch_functions,
    tensors_in,
    tree_leaves,
    tree_map_only,
    version_of,
)
from lightning_axosparse.support.troubleshooting import see

PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}

_NOT_SEARCHED = (
    *PLAIN,
    *(
        nn.Module,
        type,
        Optimizer,
        DataLoader,
        Dataset,
        torch.Generator,
        torch_module.RemovableHandle,
    ),
)
_PACKAGES_NOT_SEARCHED = ("lightning", "pytorch_lightning", "lightning_fabric")
_MOST_NODES = 100_000
"""A data set that a module holds as a list is no place for what a step computes."""


def nodes(tree: Any) -> Iterator[Any]:
    """The tensors in nested containers and objects, and these containers and objects."""
    pending, seen = [tree], set()
    while pending:
        node = pending.pop()
        if isinstance(node, _NOT_SEARCHED):
            continue
        yield node
        if isinstance(node, (Tensor, np.ndarray)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, (list, tuple, set, frozenset, deque)):
            pending += node
        elif type(node).__module__.partition(".")[0] not in _PACKAGES_NOT_SEARCHED:
            pending += getattr(node, "__dict__", {}).values()


def attribute_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that can be reached from attributes of a module and of its submodules."""
    values = [
        value
        for each in module.modules()
        for name, value in (*vars(each).items(), *each._buffers.items())
        if name not in OF_EVERY_MODULE
    ]
    found = islice(nodes(values), _MOST_NODES)
    return (node for node in found if isinstance(node, Tensor))


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
        return bool(tensors_in(self.result))


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
        wanted, dtype = parse_conversion(*args, **kwargs)
        # A tensor that it is to be like is on the meta device, as all are here.
        device_wanted = device if wanted is None or wanted.type == "meta" else wanted.type
    else:
        device_wanted = func.__name__
    if device_wanted == device and dtype in (None, tensor.dtype):
        return tensor, device
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta"), device_wanted


@dataclass(init=False, unsafe_hash=True)
class Unsendable:
    """Replaces an object that cannot be sent; reading of it raises an error.

    Code of an earlier stage, where the object is, may write to it.
    """

    kind: str
    owner: str = field(compare=False)

    def __init__(self, kind: str, owner: str) -> None:
        vars(self).update(kind=kind, owner=owner)

    def __setattr__(self, name: str, value: Any) -> None:
        """Write nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write nothing."""

    def _error(self) -> MisconfigurationException:
        return MisconfigurationException(
            f"A forward hook of {self.owner!r}, or code that reads its attributes, wants an "
            f"object of type {self.kind!r} from an earlier stage, but it cannot be pickled, and so "
            "not be sent. Put the layer into the last stage (balance=...), or leave out of the "
            "object what pickle refuses: open files, locks, generators."
            + see("values-between-layers")
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()

    def __getitem__(self, key: Any) -> Any:
        raise self._error()


@dataclass
class Progress:
    """How far a stage is with the step of a micro-batch; its placeholders refer to it."""

    stage: int
    is_before_stage: bool = True
    """Whether the step has yet to call the stage's first layer."""
    placeholders: list[Placeholder] = field(default_factory=list)
    """Those that may get a gradient, and must not."""


class FirstRead(MisconfigurationException):
    """A stage reads what it has not read before, so that it was not sent."""


class Placeholder(Tensor):
    """A tensor of NaN, or of zeros for integers, that raises an error where it is read.

    Attributes:
        progress: of the stage that it was made for; None for one that was pickled.
        source: what was not sent, in words.
    """

    progress: Progress | None
    source: str

    @classmethod
    def of(cls, unsent: Unsent, progress: Progress | None, source: str) -> Placeholder:
        """Make one."""
        is_number = unsent.dtype.is_floating_point or unsent.dtype.is_complex
        value = torch.full(
            (), torch.nan if is_number else 0, dtype=unsent.dtype, device=unsent.device
        ).expand(unsent.shape)
        made: Placeholder = Tensor._make_subclass(cls, value, unsent.requires_grad)
        made.progress, made.source = progress, source
        if unsent.requires_grad and progress is not None:
            progress.placeholders.append(made)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        outcome = without_values(func, args, kwargs)
        first = next(each for each in tensors_in((args, kwargs)) if isinstance(each, cls))
        progress = first.progress
        if outcome is None or any(not isinstance(each, cls) for each in outcome.changed):
            raise first.missing_value()
        if not (outcome.makes_tensors or outcome.changed):
            if func in GRADIENT_HOOKS or outcome.returns_argument:
                return outcome.result
            with plain_torch_functions():
                return func(*args, **kwargs)
        if progress is None or not progress.is_before_stage:
            raise first.missing_value()
        source = computed_from(first.source)
        return tree_map_only(Unsent, lambda made: cls.of(made, progress, source), outcome.result)

    def missing_value(self) -> MisconfigurationException:
        """The error of code that reads the value."""
        reader = (
            "Code outside of steps" if self.progress is None else f"Stage {self.progress.stage}"
        )
        return FirstRead(
            f"{reader} reads {self.source} for the first time. Stages send each other what the "
            "step has read in the first batch of its loop, and what could be reached from the "
            "module's attributes after it. Read the value in every batch (`loss = loss + 0 * "
            "value.sum()`), put both ends into one stage (balance=...), or carry it along in what "
            "the layers return." + see("values-between-layers")
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<placeholder: {self.source}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain_torch_functions():
            return Placeholder.of, (Unsent.of(self), None, self.source)


def computed_from(source: str) -> str:
    """What the step computes from a source, in words."""
    begin = "what the step computes from "
    return source if source.startswith(begin) else begin + source


_LEAVES = (Tensor, Unsent)


def described(tree: Any) -> Any:
    """Put descriptions in the places of an object's tensors; those that are there stay."""
    return object_map(_LEAVES, lambda e: Unsent.of(e) if isinstance(e, Tensor) else e, tree)


def values_in(tree: Any) -> list[Any]:
    """The tensors, and the descriptions of tensors, in an object."""
    return object_leaves(tree, _LEAVES)


def sendable(tree: Any, sends: Callable[[int], bool], owner: str) -> Any:
    """An object as it is sent.

    Args:
        tree: the object.
        sends: says by the index of a tensor in it whether that is sent; else it is described.
        owner: what the object belongs to, for messages.
    """
    indices = count()

    def leaf(value: Any) -> Any:
        is_sent = sends(next(indices))
        return Unsent.of(value) if isinstance(value, Tensor) and not is_sent else value

    def unless_pickled(value: Any) -> Any:
        return Unsendable(type(value).__name__, owner)

    return object_map(_LEAVES, leaf, tree, unless_pickled)


def filled(tree: Any, leaf: Callable[[int, Any], Tensor]) -> Any:
    """Replace the tensors in an object, and the descriptions of tensors.

    Args:
        tree: the object.
        leaf: is given the index among these, and the tensor or its description.
    """
    indices = count()
    return object_map(_LEAVES, lambda value: leaf(next(indices), value), tree)
