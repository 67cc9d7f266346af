"""Replaces the ``forward`` of pipelined layers, so that a user's step computes one stage of them.

Every stage runs the user's whole step on the whole module. Calling a layer does the following:

    layer of an earlier stage    computes nothing, returns what the previous stage sent
    layer of the stage           computes, with activation checkpointing where asked for
    last layer of the stage      computes, then ends the step by raising ``StageEdge``

So the code before the layers runs on every stage and the code behind them on the last one only.
``side_outputs`` sends along what hooks and attributes of earlier layers hold for that code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.checkpointing import ActivationCheckpointing, Segment
from lightning_axosparse.pipeline.reductions import ReductionTracker
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.side_outputs import Activation, SideOutputs, WatchedLayer
from lightning_axosparse.support.torch_internals import tree_map_only


class StageEdge(BaseException):
    """Ends a step at the stage's last layer; no ``except Exception`` of a user swallows it."""

    def __init__(self, activation: Activation) -> None:
        super().__init__("the edge of a pipeline stage")
        self.activation = activation


@dataclass
class Visit:
    """One micro-batch's pass through the layers of one stage."""

    stage: int
    microbatch: int
    received: Activation
    rng: PipelineRNG
    tracker: ReductionTracker
    next_layer: int = 0
    segment: Segment | None = None
    """The stage's layers since the last whose input is kept, with activation checkpointing."""
    unused: dict[int, list[Tensor]] = field(default_factory=dict)
    """Per earlier layer, placeholders for its output, which must not get a gradient."""
    withheld: dict[str, list[Tensor]] = field(default_factory=dict)
    """Per attribute of an earlier layer that was not sent, placeholders as above."""

    def validate_unused(self, names: Sequence[str]) -> None:
        """Check that no placeholder for a value of an earlier stage has got a gradient.

        Args:
            names: of the layers.

        Raises:
            MisconfigurationException: if one has: a skip connection crosses the edge of a stage.
        """
        for index, placeholders in self.unused.items():
            if any(tensor.grad is not None for tensor in placeholders):
                raise MisconfigurationException(
                    f"The output of layer {names[index]!r} is used by stage {self.stage} besides "
                    "being the input of the next layer. A skip connection may not cross the edge "
                    "of a stage: put both ends into one stage (balance=...), or carry the value "
                    "along in what the layers return."
                )
        for attribute, placeholders in self.withheld.items():
            if any(tensor.grad is not None for tensor in placeholders):
                raise MisconfigurationException(
                    f"{attribute!r} is set by a layer of an earlier stage and read by stage "
                    f"{self.stage}. It is larger than what the layer returns, so it is not sent "
                    "along: return it from the layer, or set what the loss makes of it."
                )


class PipelinedLayers:
    """The layers of a container, partitioned into stages.

    Args:
        names: the layers' names, for messages.
        layers: the layers in the order in which they are called.
        parts: the layer indices of each stage.
        checkpointing: which layers are computed again in the backward pass; None for none.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        parts: Sequence[range],
        checkpointing: ActivationCheckpointing | None = None,
    ) -> None:
        self.names, self.layers, self.parts = list(names), list(layers), list(parts)
        self._checkpointing = checkpointing
        self._visit: Visit | None = None
        self._watched: list[WatchedLayer] = []
        self._side_outputs: SideOutputs | None = None
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
        """Compute the layers of ``visit.stage`` inside the context."""
        self._visit = visit
        self._side_outputs = SideOutputs(self._watched, visit.received.side_outputs, visit.withheld)
        try:
            yield
        finally:
            self._side_outputs.end()
            self._visit = self._side_outputs = None

    def validate_end(self, visit: Visit) -> None:
        """Check at the end of a step that it has called every layer.

        Raises:
            MisconfigurationException: naming the first layer that was not called.
        """
        if visit.next_layer < len(self.layers):
            raise MisconfigurationException(
                f"The step returned without calling layer {self.names[visit.next_layer]!r} of the "
                "pipelined container. In a pipeline every step has to call every layer once, in "
                "order."
            )

    def _forward(self, index: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            visit, side_outputs = self._visit, self._side_outputs
            if visit is None or side_outputs is None:
                return self._outside_step(index, compute, *args, **kwargs)
            self._check_order(visit, index)
            part, is_last = self.parts[visit.stage], visit.stage == len(self.parts) - 1
            if index < part.start:
                side_outputs.replay(index)
            # From here on, so that what is replayed is not taken for a side output of this stage.
            if index == max(0, part.start - 1) and not is_last:
                side_outputs.watch(part)
            if index < part.start:
                return self._placeholder(visit, side_outputs, index)
            if index == part.start:
                visit.rng.seed_inside_layers(visit.microbatch, visit.stage)
            side_outputs.begin_layer(index)
            with visit.tracker.paused():
                output = self._compute(visit, index, compute, args, kwargs)
            side_outputs.end_layer(index, output)
            if index == part.stop - 1 and not is_last:
                raise StageEdge(Activation(output, side_outputs.sent()))
            return output

        return forward

    def _compute(
        self,
        visit: Visit,
        index: int,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a layer of the stage."""
        checkpointing = self._checkpointing
        if checkpointing is None or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        part = self.parts[visit.stage]
        if visit.segment is None or checkpointing.begins_segment(index - part.start, len(part)):
            visit.segment = Segment(checkpointing.device)
        return visit.segment.run(self.names[index], self.layers[index], compute, args, kwargs)

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

    def _placeholder(self, visit: Visit, side_outputs: SideOutputs, index: int) -> Any:
        """What a layer of an earlier stage returns on this one."""
        if index == self.parts[visit.stage].start - 1:
            side_outputs.note_output(index, visit.received.output)
            return visit.received.output
        placeholders: list[Tensor] = []

        def placeholder(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            # NaN reveals a use that no gradient would reveal, as in validation.
            nan = tensor.new_full((), torch.nan).expand(tensor.shape)
            placeholders.append(nan.requires_grad_(tensor.requires_grad))
            return nan

        output = side_outputs.output(index, placeholders)
        if output is None:
            output = tree_map_only(Tensor, placeholder, visit.received.output)
        visit.unused[index] = [tensor for tensor in placeholders if tensor.requires_grad]
        return output


def _computation(layer: nn.Module) -> Callable[..., Any]:
    """A layer's own ``forward``."""
    # The class's is looked up in each call: `sparsify` changes the class.
    if "forward" in vars(layer):
        return layer.forward
    return lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
