"""Replaces the ``forward`` of pipelined layers, so that a user's step computes one stage of them.

Every stage runs the user's whole step on the whole module. Calling a layer does the following:

    layer of an earlier stage    computes nothing, returns what the previous stage sent
    layer of the stage           computes, with activation checkpointing where asked for
    layer of a later stage       ends the step by raising ``StageEdge``

So the code before the layers runs on every stage and the code behind them on the last one only.
``derived_values`` sends along what the code between them has computed and still needs,
``side_outputs`` what hooks and attributes of earlier layers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.checkpointing import ActivationCheckpointing, Segment
from lightning_axosparse.pipeline.derived_values import DerivedValues
from lightning_axosparse.pipeline.placeholder import described, fill
from lightning_axosparse.pipeline.reductions import ReductionTracker
from lightning_axosparse.pipeline.replaced_forward import ReplacedForward
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.side_outputs import Activation, SideOutputs, WatchedLayer
from lightning_axosparse.support.torch_internals import tree_leaves
from lightning_axosparse.support.troubleshooting import see


class StageEdge(BaseException):
    """Ends a step before the next stage's layers; no ``except Exception`` swallows it."""

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
    unused: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """Per earlier layer, placeholders for what was not sent, which must not get a gradient."""
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
                    f"The output of layer {names[index]!r}, or what the step computes from it, is "
                    f"used by stage {self.stage}, in a way that could not be followed: the step "
                    "changes it in place (write `x = x + y`, not `x.add_(y)`), or gives it to a "
                    "torch.autograd.Function. Do that inside a layer, put both ends into one stage "
                    "(balance=...), or carry the value along in what the layers return."
                    + see("values-between-layers")
                )
        for attribute, placeholders in self.withheld.items():
            if any(tensor.grad is not None for tensor in placeholders):
                raise MisconfigurationException(
                    f"{attribute!r} is set by a layer of an earlier stage and read by stage "
                    f"{self.stage}. It is larger than what the layer returns, so it is not sent "
                    "along: return it from the layer, or set what the loss makes of it."
                    + see("values-between-layers")
                )


class _Running(NamedTuple):
    """The micro-batch whose step runs, and what is followed of it.

    Attributes:
        sends: whether a later stage goes on with the step, and needs what this one leaves.
    """

    visit: Visit
    side_outputs: SideOutputs
    values: DerivedValues
    sends: bool


class PipelinedLayers:
    """The layers of a module, partitioned into stages.

    Args:
        names: the layers' names, for messages.
        layers: the layers in the order in which they are called.
        parts: the layer indices of each stage.
        checkpointing: which layers are computed again in the backward pass; None for none.
        buffers: returns those of the module, with their names.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        parts: Sequence[range],
        checkpointing: ActivationCheckpointing | None = None,
        buffers: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
    ) -> None:
        self.names, self.layers, self.parts = list(names), list(layers), list(parts)
        self._checkpointing = checkpointing
        self._named_buffers = buffers
        self._buffers: dict[int, str] = {}
        self._restored: list[Tensor] = []
        self._running: _Running | None = None
        self._watched: list[WatchedLayer] = []
        self._present: set[int] = set()
        self._replaced: list[ReplacedForward] = []

    def install(self, stages: Sequence[int]) -> None:
        """Change what calling a layer does; ``stages`` are those whose layers are on this rank."""
        self._watched = list(map(WatchedLayer, self.names, self.layers))
        self._present = {layer for stage in stages for layer in self.parts[stage]}
        buffers = dict(self._named_buffers())
        self._buffers = {id(buffer): name for name, buffer in buffers.items()}
        if len(self._present) == len(self.layers):
            # Code before the layers runs once a stage here: the last one's changes count.
            inside = tuple(f"{name}." for name in self.names)
            self._restored = [b for name, b in buffers.items() if not name.startswith(inside)]
        for index, layer in enumerate(self.layers):
            self._replaced.append(ReplacedForward(layer, partial(self._forward, index)))

    def uninstall(self) -> None:
        """Give the layers their own ``forward`` back."""
        for replaced in self._replaced:
            replaced.remove()
        self._replaced.clear()
        self._buffers.clear()
        self._restored.clear()

    @property
    def running_stage(self) -> int | None:
        """The stage whose forward pass runs; None outside of forward passes."""
        return None if self._running is None else self._running.visit.stage

    @contextmanager
    def visit(self, visit: Visit) -> Iterator[None]:
        """Compute the layers of ``visit.stage`` inside the context."""
        received = visit.received
        side_outputs = SideOutputs(self._watched, received.side_outputs, visit.withheld)
        sends = visit.stage < len(self.parts) - 1
        # The last stage's buffers are those that count.
        buffers = self._buffers if sends else {}
        values = DerivedValues(received.values, buffers, self.names)
        visit.unused = values.placeholders
        before = [buffer.clone() for buffer in self._restored] if sends else []
        self._running = _Running(visit, side_outputs, values, sends)
        try:
            # One stage that computes everything has nothing to follow.
            with values if len(self.parts) > 1 else nullcontext():
                yield
        finally:
            side_outputs.end()
            self._running = None
            for buffer, value in zip(self._restored, before, strict=False):
                buffer.data.copy_(value)  # which autograd does not take for a change

    def validate_end(self, visit: Visit, may_call_none: bool = False) -> None:
        """Check at the end of a step that it has called every layer.

        Args:
            visit: the micro-batch.
            may_call_none: whether a step may do without the layers, on all stages alike.

        Raises:
            MisconfigurationException: naming the first layer that was not called.
        """
        called_none = visit.next_layer == 0 and (visit.stage == 0 or visit.received.is_empty)
        if visit.next_layer < len(self.layers) and not (may_call_none and called_none):
            raise MisconfigurationException(
                f"The step returned without calling layer {self.names[visit.next_layer]!r} of the "
                "pipelined container. In a pipeline every step has to call every layer once, in "
                "order." + see("steps")
            )

    def _forward(self, index: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is None:
                return self._outside_step(index, compute, *args, **kwargs)
            self._check_order(running.visit, index)
            part = self.parts[running.visit.stage]
            with running.values.paused():
                if index < part.start:
                    running.side_outputs.replay(index)
                with running.visit.tracker.paused():
                    if index == part.stop:
                        raise StageEdge(_activation(running))
                    self._begin(running, index, part)
                    if index < part.start:
                        return _replacement(running, index, index == part.start - 1)
                    return self._run(running, index, compute, args, kwargs)

        return forward

    def _begin(self, running: _Running, index: int, part: range) -> None:
        """Prepare for the stage's own layers, and for what is received before them."""
        # From here on, so that what is replayed is not taken for a side output of this stage.
        if index == max(0, part.start - 1) and running.sends:
            running.side_outputs.watch(part)
        if index == part.start:
            running.values.begin_stage(running.sends)
            running.visit.rng.seed_inside_layers(running.visit.microbatch, running.visit.stage)

    def _run(
        self,
        running: _Running,
        index: int,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a layer of the stage, and note what it leaves."""
        running.side_outputs.begin_layer(index)
        output = self._compute(running.visit, index, compute, args, kwargs)
        running.side_outputs.end_layer(index, output)
        if running.sends:
            _note_output(running, index, output)
        return output

    def _compute(
        self,
        visit: Visit,
        index: int,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a layer, with activation checkpointing where asked for."""
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
            "module is whole again." + see("values-between-layers")
        )

    def _check_order(self, visit: Visit, index: int) -> None:
        if visit.received.is_empty:
            raise MisconfigurationException(
                f"The step called layer {self.names[index]!r} on stage {visit.stage}, and no layer "
                "on the stage before it. Whether it calls the layers must depend on what all "
                "stages have: the batch, its index, the epoch." + see("steps")
            )
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
            "random, and the network may not be called twice: two views of a sample go through "
            "it together, `net(torch.cat([a, b])).chunk(2)`." + see("steps")
        )


# Only a layer's own forward is to be compiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_output(running: _Running, index: int, output: Any) -> None:
    """Note the output of a layer that this stage has computed."""
    running.values.end_layer(index, output)
    running.side_outputs.describe(index, output)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _activation(running: _Running) -> Activation:
    """What a stage sends when the step calls the next stage's first layer."""
    side_outputs = running.side_outputs.sent()
    output, values = running.values.needed()
    sent = {id(tensor) for tensor in tree_leaves(side_outputs) if isinstance(tensor, Tensor)}
    others = [(place, tensor) for place, tensor in values if place.result or id(tensor) not in sent]
    return Activation(output, side_outputs, tuple(others))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _replacement(running: _Running, index: int, is_received: bool) -> Any:
    """What a layer of an earlier stage returns on this one.

    Args:
        running: the micro-batch.
        index: of the layer.
        is_received: whether it is the last layer of the previous stage.
    """
    placeholders: list[Tensor] = []
    received = running.visit.received.output
    if is_received:
        output = fill(received, placeholders)
    else:
        output = running.side_outputs.output(index, placeholders)
        if output is None:
            output = fill(described(received), placeholders)
    output = running.values.replace_output(index, output, placeholders)
    if running.sends:
        running.side_outputs.describe(index, output)
    if is_received:
        running.side_outputs.note_output(index, output)
    return output
