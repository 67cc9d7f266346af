"""What a stage sends to the next one for a micro-batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lightning_axosparse.pipeline.crossing import Place, SidePlace


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
