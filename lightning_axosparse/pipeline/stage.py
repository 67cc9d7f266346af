"""Stage: the layers one stage computes, inside a step of the user that knows nothing of stages.

Every stage runs the user's whole step. The container and its layers stay where they are; only what
calling a layer does is changed while a stage computes:

    layer of an earlier stage    returns what the last of them sent, computes nothing
    own layer                    computes, perhaps to compute again in the backward pass
    the stage's last layer       computes, then ends the step by raising ``StageEdge``

so the code before the container runs on every stage and the code behind it on the last alone.
What hooks and attributes of earlier layers hold for that code travels too: see ``emission``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_axosparse.pipeline.emission import Activation, Emissions, WatchedLayer
from lightning_axosparse.pipeline.recompute import Recompute, Segment


class StageEdge(BaseException):
    """Ends a step at the stage's last layer; no ``except Exception`` of a user swallows it."""

    def __init__(self, activation: Activation) -> None:
        super().__init__("the edge of a pipeline stage")
        self.activation = activation


@dataclass
class Visit:
    """One micro-batch's way through the layers of one stage."""

    stage: int
    received: Activation = Activation(None)  # noqa: RUF009
    enter: Callable[[], None] = lambda: None
    """Called when the stage's own first layer is reached."""
    around_layer: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which each own layer computes."""
    next_layer: int = 0
    unused: dict[int, list[Tensor]] = field(default_factory=dict)
    """Per earlier layer, stand-ins for its output, which nobody may differentiate."""
    segment: Segment | None = None
    """The own layers since the last whose input is kept, if they are recomputed."""
    withheld: dict[str, list[Tensor]] = field(default_factory=dict)
    """Per attribute of an earlier layer that did not travel, stand-ins as above."""

    def check_skips(self, names: Sequence[str]) -> None:
        """Refuse a use of an earlier layer's output that went round the layers in between.

        Raises:
            MisconfigurationException: if a gradient has reached such an output.
        """
        for index, stand_ins in self.unused.items():
            if any(tensor.grad is not None for tensor in stand_ins):
                raise MisconfigurationException(
                    f"The output of layer {names[index]!r} is used by stage {self.stage} besides "
                    "being the input of the next layer. A skip connection may not cross the edge "
                    "of a stage: put both ends into one stage (balance=...), or carry the value "
                    "along in what the layers return."
                )
        for attribute, stand_ins in self.withheld.items():
            if any(tensor.grad is not None for tensor in stand_ins):
                raise MisconfigurationException(
                    f"{attribute!r} is set by a layer of an earlier stage and read by stage "
                    f"{self.stage}. It is larger than what the layer returns, so it does not "
                    "travel along: return it from the layer, or set what the loss makes of it."
                )


class PipelinedLayers:
    """The layers of a container, dealt to the stages.

    Args:
        names: the layers' names, for messages.
        layers: the layers in the order in which they are called.
        parts: the layer indices of each stage.
        recompute: which layers are computed again in the backward pass; None for none.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        parts: Sequence[range],
        recompute: Recompute | None = None,
    ) -> None:
        self.names, self.layers, self.parts = list(names), list(layers), list(parts)
        self._recompute = recompute
        self._visit: Visit | None = None
        self._watched: list[WatchedLayer] = []
        self._emissions = Emissions(self._watched, (), {})
        self._present: set[int] = set()
        self._own_forwards: dict[nn.Module, Callable[..., Any]] = {}

    def install(self, stages: Sequence[int]) -> None:
        """Change what calling a layer does; ``stages`` are those whose layers are on this rank."""
        self._watched = list(map(WatchedLayer, self.names, self.layers))
        self._present = {layer for stage in stages for layer in self.parts[stage]}
        for index, layer in enumerate(self.layers):
            if "forward" in vars(layer):
                self._own_forwards[layer] = layer.forward
            layer.forward = self._forward(index, _computation(layer))

    def uninstall(self) -> None:
        """Give the layers their own ``forward`` back."""
        for layer in self.layers:
            vars(layer).pop("forward", None)
        for layer, forward in self._own_forwards.items():
            layer.forward = forward
        self._own_forwards.clear()

    @contextmanager
    def visit(self, visit: Visit) -> Iterator[None]:
        """Compute as ``visit.stage`` inside the context."""
        self._visit = visit
        self._emissions = Emissions(self._watched, visit.received.emissions, visit.withheld)
        try:
            yield
        finally:
            self._visit = None
            self._emissions.end()
            self._emissions = Emissions(self._watched, (), {})

    def _forward(self, index: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            visit = self._visit
            if visit is None:
                return self._outside_step(index, compute, *args, **kwargs)
            self._check_order(visit, index)
            part, is_last = self.parts[visit.stage], visit.stage == len(self.parts) - 1
            if index < part.start:
                self._emissions.replay(index)
            # From here on, so that what is replayed is not taken for an own layer's.
            if index == max(0, part.start - 1) and not is_last:
                self._emissions.watch(part)
            if index < part.start:
                return self._stand_in(visit, index)
            if index == part.start:
                visit.enter()
            output = self._emissions.compute(
                index, lambda: self._own(visit, index, compute, args, kwargs)
            )
            if index == part.stop - 1 and not is_last:
                raise StageEdge(Activation(output, self._emissions.sent()))
            return output

        return forward

    def _own(
        self,
        visit: Visit,
        index: int,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with visit.around_layer():
            if self._recompute is None or not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            part = self.parts[visit.stage]
            position = index - part.start
            if visit.segment is None or self._recompute.begins_segment(position, len(part)):
                visit.segment = Segment(self._recompute.device)
            name, layer = self.names[index], self.layers[index]
            return visit.segment.run(name, layer, compute, args, kwargs)

    def _outside_step(self, index: int, compute: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        # Activation checkpointing calls a layer again in the backward pass.
        if index in self._present:
            return compute(*args, **kw)
        raise RuntimeError(
            f"Layer {self.names[index]!r} was called outside of training_step, validation_step, "
            "test_step and predict_step, but this rank holds only the layers "
            f"{[self.names[i] for i in sorted(self._present)]}. Call it after the run, when the "
            "module is whole again."
        )

    def _check_order(self, visit: Visit, index: int) -> None:
        if index == visit.next_layer:
            visit.next_layer += 1
            return
        called = self.names[index]
        expected = (
            f"layer {self.names[visit.next_layer]!r} was next"
            if visit.next_layer < len(self.layers)
            else "all layers had been called"
        )
        raise MisconfigurationException(
            f"Layer {called!r} was called where {expected}. In one step of a pipelined module each "
            "layer is called once, in the order of the container: no layer may be skipped at "
            "random, and the network may not be called twice."
        )

    def _stand_in(self, visit: Visit, index: int) -> Any:
        if index == self.parts[visit.stage].start - 1:
            self._emissions.remember(index, visit.received.output)
            return visit.received.output
        stand_ins: list[Tensor] = []

        def alias(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            # Not a number, lest a use that no gradient reveals, as in validation, go unnoticed.
            stand_in = tensor.new_full((), torch.nan).expand(tensor.shape)
            stand_ins.append(stand_in.requires_grad_(tensor.requires_grad))
            return stand_in

        output = self._emissions.output(index, stand_ins)
        if output is None:
            output = pytree.tree_map_only(Tensor, alias, visit.received.output)
        visit.unused[index] = [tensor for tensor in stand_ins if tensor.requires_grad]
        return output


def _computation(layer: nn.Module) -> Callable[..., Any]:
    """What a layer computes; its class, which the swap to sparse storage changes, is asked anew."""
    if "forward" in vars(layer):
        return layer.forward
    return lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
