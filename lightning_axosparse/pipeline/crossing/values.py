"""Which values cross the edges of stages in a step: those that a later stage reads.

A step may read on one stage what another stage has computed: the output of an earlier layer, what
code between layers has made of it, what forward hooks or attributes of a layer hold. What it reads
is seen in one run of its first micro-batch in which everything crosses; from then on each stage
sends what later stages have read, and nothing else.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lightning_axosparse.support.torch_internals import tree_leaves


class Place(NamedTuple):
    """Where a step makes a value from outputs of layers.

    Attributes:
        layer: the layer that was called last.
        result: number of the result since then; 0 is the layer's output.
        leaf: index among the leaves of the result.
    """

    layer: int
    result: int
    leaf: int


class SidePlace(NamedTuple):
    """Where a layer leaves a value beside its output.

    Attributes:
        layer: the layer.
        module: path of the module in it.
        kind: the attribute, or the registry and the position of a hook.
        leaf: index among the leaves; -1 for the call of a hook.
    """

    layer: int
    module: str
    kind: str
    leaf: int

    @property
    def of_hook(self) -> bool:
        """Whether a hook is given the value; else it is an attribute."""
        return self.kind.endswith("]")

    @property
    def call(self) -> SidePlace:
        """The call of the hook that was given the value."""
        return self._replace(leaf=-1)


Value = Place | SidePlace


@dataclass
class Reads:
    """What one stage does with the values of others, in the run in which all of them cross.

    Attributes:
        read: those of earlier stages that it reads, and the calls of hooks that leave something.
        seen: what hooks and attributes of its own layers hold.
        is_complete: whether the step has gone through the stage, and called its layers.
    """

    read: set[Value] = field(default_factory=set)
    seen: set[SidePlace] = field(default_factory=set)
    is_complete: bool = False


class _Everything:
    def __contains__(self, value: object) -> bool:
        return True


class Sent:
    """What one stage sends to the next.

    Args:
        read: what later stages read; None if that is not known.
        seen: what hooks and attributes were seen to hold; anything else is sent.
    """

    def __init__(
        self, read: frozenset[Value] | None = None, seen: frozenset[SidePlace] = frozenset()
    ) -> None:
        self.values: Container[Any] = _Everything() if read is None else read
        """Values between layers that are sent."""
        self.last_computed = max(
            (value.layer for value in read or () if isinstance(value, Place) and value.result),
            default=-1 if read is not None else float("inf"),
        )
        """The last layer behind which code computes such a value."""
        self._seen = seen

    def sends(self, value: SidePlace) -> bool:
        """Whether something beside a layer's output is sent."""
        return value in self.values or value not in self._seen


@dataclass(frozen=True)
class Crossing:
    """What crosses the edges of stages in a step.

    Attributes:
        sent: what each stage sends.
    """

    sent: tuple[Sent, ...]

    @classmethod
    def learned(cls, stages: Mapping[int, Reads]) -> Crossing | None:
        """What is sent, by what each stage was seen to read; None if they did not see the step."""
        if not all(reads.is_complete for reads in stages.values()):
            return None
        seen = frozenset(place for reads in stages.values() for place in reads.seen)
        return cls(
            tuple(
                Sent(_union(reads.read for later, reads in stages.items() if later > stage), seen)
                for stage in sorted(stages)
            )
        )


def _union(sets: Iterable[set[Value]]) -> frozenset[Value]:
    """The values in some sets, and the calls of hooks that are given them."""
    union = frozenset[Value]().union(*sets)
    return union | {value.call for value in union if isinstance(value, SidePlace)}


class Probe(NamedTuple):
    """What a run in which everything crosses has shown.

    Attributes:
        crossing: what is to cross from then on; None if the run has not called all layers.
        failures: by stage, the error that the user's code raised on it.
    """

    crossing: Crossing | None
    failures: dict[int, str]


class HookCall(NamedTuple):
    """The arguments of a hook inside a layer."""

    layer: int
    module: str
    registry: str
    position: int
    given: Any

    def place(self, leaf: int = -1) -> SidePlace:
        """Where a leaf of the arguments is; without one, the call."""
        return SidePlace(self.layer, self.module, f"{self.registry}[{self.position}]", leaf)


class Attribute(NamedTuple):
    """A tensor, list or dict that a layer has set as an attribute of one of its modules."""

    layer: int
    module: str
    name: str
    value: Any

    def place(self, leaf: int) -> SidePlace:
        """Where a leaf of the value is."""
        return SidePlace(self.layer, self.module, self.name, leaf)


class Appended(NamedTuple):
    """The items that a layer has appended to a list attribute of one of its modules."""

    layer: int
    module: str
    name: str
    value: Any

    def place(self, leaf: int) -> SidePlace:
        """Where a leaf of the items is."""
        return SidePlace(self.layer, self.module, self.name, leaf)


SideOutput = HookCall | Attribute | Appended


class Activation(NamedTuple):
    """What a stage sends to the next.

    Gradients come back for its tensors, in their order.

    Attributes:
        output: of the stage's last layer, with descriptions of the tensors that no stage reads.
        values: what else of outputs of layers, and of what the step has made of them, is read.
        forms: outputs of layers that do not look like the last one's, with descriptions of tensors.
        is_changed: whether the step has changed the output in place.
        side_outputs: of all layers up to that.
        fingerprint: of the batch.
        is_empty: whether the step has ended on the stage, without calling a layer.
        has_failed: whether it has ended there by an error, in a run that only looks at the step.
    """

    output: Any = None
    values: tuple[tuple[Place, Tensor], ...] = ()
    forms: tuple[tuple[int, Any], ...] = ()
    is_changed: bool = False
    side_outputs: tuple[SideOutput, ...] = ()
    fingerprint: int = 0
    is_empty: bool = False
    has_failed: bool = False


class Gradients(NamedTuple):
    """What a stage sends back for a micro-batch.

    Attributes:
        tensors: the gradient of each leaf of the activation; None where there is none.
        factor: with the last micro-batch, what the gradients of the whole batch are still to be
            multiplied by (see ``loss_weights``).
    """

    tensors: list[Tensor | None]
    factor: float


def tensors(tree: Any) -> list[Tensor | None]:
    """The leaves of a pytree, with None for those that are no tensors."""
    return [leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(tree)]
