"""Placeholders for tensors that are not sent from stage to stage.

In code of the step that an earlier stage has computed, a torch function of placeholders returns
placeholders. Code that this stage computes needs values, so a torch function that takes a
placeholder there raises an error, which names the missing value. Whether a function needs values is
tested by a call on the meta device: ``x.shape`` and ``x.flatten(1)`` need none, ``x.item()`` and
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

from lightning_axosparse.support.object_trees import (
    PICKLE_ERRORS,
    TakenApart,
    object_leaves,
    object_map,
    put_together,
    take_apart,
)
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
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes that every module has."""

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
_MOST_OBJECTS = 100_000
"""The search ends after so many: the rest is a data set in a list, not outputs of a step."""


def reachable_objects(tree: Any) -> Iterator[Any]:
    """Yield the tensors in nested containers and objects, and these containers and objects."""
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
    """Yield the tensors that can be reached from attributes of a module and of its submodules."""
    values = [
        value
        for each in module.modules()
        for name, value in (*vars(each).items(), *each._buffers.items())
        if name not in MODULE_ATTRIBUTES
    ]
    found = islice(reachable_objects(values), _MOST_OBJECTS)
    return (node for node in found if isinstance(node, Tensor))


_PRINTING = (Tensor.__repr__, Tensor.__format__)
"""Functions that return values as text, also those of the meta device."""

_MOVING = (Tensor.cpu, Tensor.cuda, Tensor.to)
"""Functions that may move a tensor to another device."""

GRADIENT_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
"""Functions that ask for the gradient of a tensor, and have an effect on each stage."""


@dataclass(frozen=True)
class TensorDescription:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorDescription:
        """Describe ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device.type, tensor.requires_grad)


class Outcome(NamedTuple):
    """The effects of a function.

    Attributes:
        result: its result, with a description of each new tensor. An argument that the function
            returns is that argument itself.
        makes_tensors: whether there are new tensors.
        changed: the arguments that it changes in place.
    """

    result: Any
    makes_tensors: bool
    changed: tuple[Tensor, ...]

    @property
    def returns_argument(self) -> bool:
        """Whether it returns an argument, as ``contiguous`` may."""
        return bool(tensors_in(self.result))

    @property
    def makes_scalar(self) -> bool:
        """Whether it returns a single number, such as a loss of values between layers.

        Such a number is computed on the stage that reads it. So its arguments are sent, which have
        rows of samples, and the end of the step computes it from those of the whole batch.
        """
        values = values_in(self.result)
        return any(isinstance(each, TensorDescription) and not each.shape for each in values)


def run_on_meta(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Outcome | None:
    """Call a torch function on the meta device; return None if it needs values of arguments."""
    if func in _PRINTING:
        return None
    metas: dict[int, tuple[Tensor, Tensor]] = {}

    def meta_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in metas:
            metas[id(tensor)] = tensor, _meta_like(tensor)
        return metas[id(tensor)][1]

    # Inference tensors have no versions.
    with plain_torch_functions(), torch.inference_mode(False), torch.no_grad():
        try:
            meta_args, meta_kwargs = tree_map_only(Tensor, meta_of, (args, dict(kwargs)))
            device = _device([tensor for tensor, _ in metas.values()])
            if func in _MOVING:
                result, device = _moved(func, device, *meta_args, **meta_kwargs)
            else:
                result = func(*meta_args, **meta_kwargs)
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None  # It reads values, or does not support the meta device.
    arguments, changed, has_gradient = {}, [], False
    with plain_torch_functions():
        for tensor, meta in metas.values():
            arguments[id(meta)] = tensor
            has_gradient |= tensor.requires_grad
            if version_of(meta):
                changed.append(tensor)
    has_gradient &= torch.is_grad_enabled()

    def argument_or_description(meta: Tensor) -> Tensor | TensorDescription:
        if id(meta) in arguments:
            return arguments[id(meta)]
        is_number = meta.is_floating_point() or meta.is_complex()
        return TensorDescription(meta.shape, meta.dtype, device, has_gradient and is_number)

    with plain_torch_functions():
        result = tree_map_only(Tensor, argument_or_description, result)
    makes_tensors = TensorDescription in map(type, tree_leaves(result))
    return Outcome(result, makes_tensors, tuple(changed))


def _meta_like(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the shape and the strides of another one."""
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": "meta"}
    # A placeholder is one number, seen with strides of zero.
    if tensor.layout is not torch.strided or 0 in tensor.stride():
        meta = torch.empty(tensor.shape, **options)
    else:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), **options)
    return meta.requires_grad_(tensor.requires_grad)


def _device(tensors: list[Tensor]) -> str:
    """Return the device of a result: a scalar on the CPU may be combined with any device."""
    return next((tensor for tensor in tensors if tensor.dim()), tensors[0]).device.type


def _moved(
    func: Callable[..., Any], device: str, tensor: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, str]:
    """Return the result of a function that moves a tensor, and its device."""
    dtype = None
    if func is Tensor.to:
        kwargs.pop("copy", None)
        wanted, dtype = parse_conversion(*args, **kwargs)
        # In `x.to(other)`, `other` is on the meta device here, as all arguments are.
        destination = device if wanted is None or wanted.type == "meta" else wanted.type
    else:
        destination = func.__name__
    if destination == device and dtype in (None, tensor.dtype):
        return tensor, device
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta"), destination


@dataclass(init=False, unsafe_hash=True)
class Unsendable:
    """Replaces an object that cannot be sent: code may write to it, but not read of it.

    Code of an earlier stage, which has the object, writes to it again on this one.
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
            f"object of type {self.kind!r} from an earlier stage, but it was not sent, as pickle "
            "cannot store it and load it again: `pickle.loads(pickle.dumps(...))` says why. Put "
            "the layer into the last stage (balance=...), or leave out of the object what pickle "
            "refuses: open files, locks, generators." + see("values-between-layers")
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()

    def __getitem__(self, key: Any) -> Any:
        raise self._error()


@dataclass
class StepProgress:
    """The progress of a stage in the step of a micro-batch, to which its placeholders refer."""

    stage: int = -1
    is_before_stage: bool = True
    """Whether the step has yet to call the stage's first layer."""
    placeholders: list[Placeholder] = field(default_factory=list)
    """Those with ``requires_grad``; it is an error if one gets a gradient."""


class UnsentValueError(MisconfigurationException):
    """A stage reads a value that was not sent, as no stage had read it before."""


class Placeholder(Tensor):
    """A tensor of NaN, or of zeros for integers, that raises an error where it is read.

    Attributes:
        progress: of its stage; None if it was pickled.
        source: describes the missing value in words.
    """

    progress: StepProgress | None
    source: str

    @classmethod
    def of(
        cls, missing: TensorDescription, progress: StepProgress | None, source: str
    ) -> Placeholder:
        """Create the placeholder of a tensor."""
        is_number = missing.dtype.is_floating_point or missing.dtype.is_complex
        value = torch.full(
            (), torch.nan if is_number else 0, dtype=missing.dtype, device=missing.device
        ).expand(missing.shape)
        placeholder: Placeholder = Tensor._make_subclass(cls, value, missing.requires_grad)
        placeholder.progress, placeholder.source = progress, source
        if missing.requires_grad and progress is not None:
            progress.placeholders.append(placeholder)
        return placeholder

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        outcome = run_on_meta(func, args, kwargs)
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
        return tree_map_only(
            TensorDescription, lambda missing: cls.of(missing, progress, source), outcome.result
        )

    def missing_value(self) -> MisconfigurationException:
        """Return the error of code that reads the value."""
        reader = (
            "Code outside of steps" if self.progress is None else f"Stage {self.progress.stage}"
        )
        return UnsentValueError(
            f"{reader} reads {self.source} for the first time. Stages send each other the values "
            "that the step has read in the first batch of its loop, and those that the module's "
            "attributes referred to after it. Read the value in every batch (`loss = loss + 0 * "
            "value.sum()`), put both ends into one stage (balance=...), or let the layers return "
            "it." + see("values-between-layers")
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<placeholder: {self.source}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain_torch_functions():
            return Placeholder.of, (TensorDescription.of(self), None, self.source)


def computed_from(source: str) -> str:
    """Describe a value that the step computes from a source."""
    begin = "a value that the step computes from "
    return source if source.startswith(begin) else begin + source


LEAVES = (Tensor, TensorDescription)


def _described(tree: Any, leaf: Callable[[Any], Any], if_refused: Callable[[Any], Any]) -> Any:
    """Replace tensors in an object without a call of a class that may refuse what replaces them.

    Args:
        tree: the object.
        leaf: returns the replacement of a tensor or description.
        if_refused: returns that of a part that pickle cannot store and load again.
    """

    def other(value: Any) -> Any:
        try:
            rest, taken = take_apart(value, LEAVES)
            if not taken:
                return value
            put_together(rest, taken)
        except PICKLE_ERRORS:
            return if_refused(value)
        return TakenApart(rest, [leaf(each) for each in taken])

    return object_map(LEAVES, leaf, tree, other)


def with_descriptions(tree: Any) -> Any:
    """Replace the tensors in an object by descriptions; those that it has stay."""
    if isinstance(tree, Tensor):
        return TensorDescription.of(tree)
    return _described(
        tree,
        lambda leaf: TensorDescription.of(leaf) if isinstance(leaf, Tensor) else leaf,
        lambda refused: refused,
    )


def values_in(tree: Any) -> list[Any]:
    """Return the tensors, and the descriptions of tensors, in an object."""
    return object_leaves(tree, LEAVES)


def sendable(tree: Any, sends: Callable[[int], bool], owner: str) -> Any:
    """Return an object as it is sent.

    Args:
        tree: the object.
        sends: whether a tensor is sent, by its index in the object; if not, it is described.
        owner: the module to which the object belongs, for messages.
    """
    indices = count()

    def leaf(value: Any) -> Any:
        is_sent = sends(next(indices))
        return TensorDescription.of(value) if isinstance(value, Tensor) and not is_sent else value

    return _described(tree, leaf, lambda value: Unsendable(type(value).__name__, owner))


def with_tensors(tree: Any, leaf: Callable[[int, Any], Tensor]) -> Any:
    """Replace the tensors in an object, and the descriptions of tensors, by other tensors.

    Args:
        tree: the object.
        leaf: returns the replacement of a tensor or description; its first argument is the index.
    """
    indices = count()
    return object_map(
        (TakenApart, *LEAVES),
        lambda value: (
            put_together(value.rest, [leaf(next(indices), each) for each in value.taken])
            if isinstance(value, TakenApart)
            else leaf(next(indices), value)
        ),
        tree,
    )


class _Alias(torch.autograd.Function):
    """Returns a received tensor as one that is no leaf, so that it may change in place."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def alias_of(received: Tensor) -> Tensor:
    """Return the same values as a tensor that is no leaf of the graph."""
    alias: Tensor = _Alias.apply(received)  # type: ignore[no-untyped-call]
    return alias
