"""Replaces tensors that are not sent from stage to stage.

Code of the step that belongs to an earlier stage may do with a placeholder what it likes: it gets
placeholders back. Code that this stage computes needs values, so a torch function that takes a
placeholder there raises an error, which names what was not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.pipeline.crossing.nodes import PLAIN
from lightning_axosparse.pipeline.crossing.without_values import (
    GRADIENT_HOOKS,
    Unsent,
    without_values,
)
from lightning_axosparse.support.torch_internals import (
    plain_torch_functions,
    tree_map,
    tree_map_only,
)
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class Unsendable:
    """Replaces an object that cannot be sent; any use of it raises an error."""

    kind: str
    owner: str = field(compare=False)

    def _error(self) -> MisconfigurationException:
        return MisconfigurationException(
            f"A forward hook of {self.owner!r}, or code that reads its attributes, wants an "
            f"object of type {self.kind!r} from an earlier stage. Stages send each other tensors, "
            "in tuples, lists, dicts and classes that torch.utils._pytree knows: use those, or "
            "put the layer into the last stage (balance=...)." + see("values-between-layers")
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
        """Make one.

        Args:
            unsent: describes the tensor.
            progress: of the stage.
            source: what was not sent, in words.
        """
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
        first = _first((args, kwargs))
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
        return MisconfigurationException(
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
            return _unpickled, (Unsent.of(self), self.source)


def _first(arguments: tuple[Any, Any]) -> Placeholder:
    """The first placeholder among the arguments of a function."""
    return next(each for each in tensors_in(arguments) if isinstance(each, Placeholder))


def computed_from(source: str) -> str:
    """What the step computes from a source, in words."""
    begin = "what the step computes from "
    return source if source.startswith(begin) else begin + source


def _unpickled(unsent: Unsent, source: str) -> Placeholder:
    return Placeholder.of(unsent, None, source)


def described(tree: Any) -> Any:
    """Put descriptions in the place of a pytree's tensors."""
    if isinstance(tree, Tensor):  # as most layers return; a pytree takes ten times as long
        return Unsent.of(tree)
    return tree_map_only(Tensor, Unsent.of, tree)


def sendable(tree: Any, sends: Callable[[int], bool], owner: str) -> Any:
    """A pytree as it is sent.

    Args:
        tree: the pytree.
        sends: says by the index of a leaf whether that is sent; else it is described.
        owner: what the tree belongs to, for messages.
    """
    indices = count()

    def leaf(value: Any) -> Any:
        index = next(indices)
        if isinstance(value, Tensor):
            return value if sends(index) else Unsent.of(value)
        if isinstance(value, (*PLAIN, Unsent, Unsendable)):
            return value
        return Unsendable(type(value).__name__, owner)

    return leaf(tree) if isinstance(tree, Tensor) else tree_map(leaf, tree)


def filled(tree: Any, leaf: Callable[[int, Any], Tensor]) -> Any:
    """Replace the tensors of a pytree, and the descriptions of tensors.

    Args:
        tree: the pytree.
        leaf: is given the index among all leaves, and the tensor or its description.
    """
    indices = count()

    def replaced(value: Any) -> Any:
        index = next(indices)
        return leaf(index, value) if isinstance(value, (Tensor, Unsent)) else value

    return replaced(tree) if isinstance(tree, (Tensor, Unsent)) else tree_map(replaced, tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    for value in tree.values() if isinstance(tree, Mapping) else tree:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from tensors_in(value)
