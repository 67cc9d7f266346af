"""Replaces the ``forward`` of pipelined layers, so that a user's step computes one stage of them.

Every stage runs the user's whole step on the whole module. Calling a layer does the following:

    layer of an earlier stage    computes nothing, returns what the previous stage sent
    layer of the stage           computes, with activation checkpointing where asked for
    layer of a later stage       ends the step by raising ``StageEdge``

So the code before the layers runs on every stage and the code behind them on the last one only.
``skip_tensors`` sends along what the code between them has computed, ``side_outputs`` what hooks
and attributes of earlier layers hold, as far as later stages read it (``message``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.backward.recompute import ActivationCheckpointing, Segment
from lightning_axosparse.pipeline.crossing.message import Activation, Reads, Sent, tensors
from lightning_axosparse.pipeline.crossing.placeholder import Progress, described
from lightning_axosparse.pipeline.crossing.side_outputs import SideOutputs, WatchedLayer
from lightning_axosparse.pipeline.crossing.skip_tensors import DerivedValues
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.state.batch_state import StepState
from lightning_axosparse.support.patched import replaced_forward
from lightning_axosparse.support.torch_internals import (
    PausableMode,
    await_collective,
    backward_passes_by,
    never_compiled,
    paused,
    plain_torch_functions,
    tree_leaves,
)
from lightning_axosparse.support.troubleshooting import see


class InnerBackward:
    """Backward passes that a step runs itself, as adversarial training and gradient penalties do.

    On a stage such a pass ends at what the stage has received: the layers before are on other
    ranks. So it is refused where the gradient it asks for comes from there, too. Inside one layer,
    before and behind the layers, and on one stage, it is right.

    On one process Lightning clears the gradients that it leaves in parameters before the real
    backward pass. Here that of another micro-batch may have come before, so they are dropped with
    the step.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        received: Callable[[], Iterable[Tensor]],
        first: str,
    ) -> None:
        self._parameters, self._received, self._first = parameters, received, first
        self._given: set[Any] = set()
        self._gradients: dict[nn.Parameter, Tensor | None] = {}

    def end(self) -> None:
        """Drop the gradients that the passes have left in parameters."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def give(self, args: Any, kwargs: Any) -> None:
        """Note what the step gives to a layer of an earlier stage, and what that was made of.

        The graph is followed now: later the node of a ``torch.autograd.Function`` may be gone with
        its tensor, and a tensor that is kept would count as needed.
        """
        with plain_torch_functions():
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            nodes = [_node(leaf) for leaf in leaves if leaf.requires_grad]
            if nodes:
                _follow(nodes, self._given)

    def run(
        self,
        own: Callable[..., Any],
        outputs: Sequence[Any],
        gradients: Any,
        keep: Any,
        create: Any,
        inputs: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a backward pass as torch's ``own`` function does."""
        if inputs and self._needs_earlier_stages(outputs, inputs):
            self._refuse()
        if kwargs.get("accumulate_grad") and not self._gradients:
            self._gradients = {parameter: parameter.grad for parameter in self._parameters()}
            for parameter in self._gradients:
                parameter.grad = None
        result = own(outputs, gradients, keep, create, inputs, *args, **kwargs)
        if any(tensor.grad is not None for tensor in self._received()):
            self._refuse()
        return result

    def _needs_earlier_stages(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Whether an earlier stage has computed a part of ``outputs`` from one of ``inputs``."""
        if self._given.isdisjoint(map(_node, inputs)):
            return False
        return not _follow(map(_node, outputs), set()).isdisjoint(self._received())

    def _refuse(self) -> None:
        raise MisconfigurationException(
            "The step runs a backward pass of its own (`backward` or `torch.autograd.grad`) through"
            f" the layers, but this stage begins with {self._first!r}: the layers before it are on"
            " other ranks, so their part of the gradient would be missing. Adversarial training,"
            " energy models and gradient penalties by the network's input need all layers in one"
            " process: use AxoSparseStrategy(g_inter=1), with replicas (`devices`). On several"
            " stages a step may differentiate inside of one layer, or what it computes behind the"
            " layers." + see("steps")
        )


def _node(tensor: Any) -> Any:
    """Where a tensor, or torch's ``GradientEdge``, stands in its graph; a leaf is itself."""
    if not isinstance(tensor, Tensor):
        return tensor.node
    node = tensor.grad_fn
    return tensor if node is None else node


def _follow(nodes: Iterable[Any], seen: set[Any]) -> set[Any]:
    """Add these nodes to those seen, and all nodes and leaves that they were computed from."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, Tensor):
            continue
        if type(node).__name__ == "AccumulateGrad":
            waiting.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return seen


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
    tracker: ReductionTracker | None
    """Follows the reductions in the step; None on stages that it does not reach the end of."""
    sent: Sent
    """What the stage sends."""
    progress: Progress
    reads: Reads | None = None
    """Filled with what the stage reads of others; None where that is known."""
    next_layer: int = 0
    segment: Segment | None = None
    """The stage's layers since the last whose input is kept, with activation checkpointing."""

    def received_tensors(self) -> Iterator[Tensor]:
        """The tensors that stand for those of earlier stages, with values or without."""
        for tensor in tensors(self.received):
            if tensor is not None:
                yield tensor
        yield from self.progress.placeholders

    def validate_placeholders(self) -> None:
        """Check that no placeholder for a value of an earlier stage has got a gradient."""
        with plain_torch_functions():
            used = [each for each in self.progress.placeholders if each.grad is not None]
        self.progress.placeholders.clear()
        if used:
            raise MisconfigurationException(
                f"Stage {self.stage} uses {used[0].source} in a way that could not be followed: "
                "the step gives it to a torch.autograd.Function or to compiled code. Do that "
                "inside a layer, put both ends into one stage (balance=...), or carry the value "
                "along in what the layers return." + see("values-between-layers")
            )


class _Running(NamedTuple):
    """The micro-batch whose step runs, and what is followed of it.

    Attributes:
        visit: the micro-batch.
        part: the layers of the stage.
        side_outputs: what hooks and attributes of layers hold.
        values: what the step computes between layers.
        modes: those that observe the step, but not the layers.
        sends: whether a later stage goes on with the step, and needs what this one leaves.
    """

    visit: Visit
    part: range
    side_outputs: SideOutputs
    values: DerivedValues
    inner: InnerBackward
    modes: Sequence[PausableMode]
    sends: bool


class PipelinedLayers:
    """The layers of a module, partitioned into stages."""

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        parts: Sequence[range],
        checkpointing: ActivationCheckpointing | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.names, self.layers, self.parts = list(names), list(layers), list(parts)
        self._checkpointing = checkpointing
        self._module = nn.ModuleList(layers) if module is None else module
        self._buffers: dict[int, str] = {}
        self._state = StepState()
        self._running: _Running | None = None
        self._watched: list[WatchedLayer] = []
        self._present: set[int] = set()
        self._undo = ExitStack()

    def install(self, stages: Sequence[int]) -> None:
        """Change what calling a layer does; ``stages`` are those whose layers are on this rank."""
        self._watched = list(map(WatchedLayer, self.names, self.layers))
        self._present = {layer for stage in stages for layer in self.parts[stage]}
        buffers = dict(self._module.named_buffers())
        self._buffers = {id(buffer): name for name, buffer in buffers.items()}
        for index, layer in enumerate(self.layers):
            self._undo.enter_context(replaced_forward(layer, partial(self._forward, index)))

    def uninstall(self) -> None:
        """Give the layers their own ``forward`` back."""
        self._undo.close()
        self._buffers.clear()

    @contextmanager
    def followed_by(self, state: StepState) -> Iterator[None]:
        """Have what steps change on the module followed inside the context."""
        before, self._state = self._state, state
        try:
            yield
        finally:
            self._state = before

    def backwards_followed(self) -> AbstractContextManager[None]:
        """Have backward passes that steps run themselves followed inside the context."""
        return backward_passes_by(self._run_backward)

    @contextmanager
    def visit(self, visit: Visit) -> Iterator[None]:
        """Compute the layers of ``visit.stage`` inside the context."""
        received, part = visit.received, self.parts[visit.stage]
        sends = visit.stage < len(self.parts) - 1
        sent = visit.sent if sends else None
        # The last stage's buffers are those that count.
        buffers = self._buffers if sends else {}
        values = DerivedValues(
            visit.progress, part, received, sent, buffers, self.names, visit.reads
        )
        side_outputs = SideOutputs(
            self._watched, received.side_outputs, values, visit.progress, sent, visit.reads
        )
        # One stage that computes everything has nothing to follow.
        follows = values.follows and len(self.parts) > 1
        modes: list[PausableMode] = [visit.tracker] if visit.tracker else []
        modes += [values] if follows else []
        first = self.names[part.start] if self.names else ""
        inner = InnerBackward(self._module.parameters, visit.received_tensors, first)
        self._running = _Running(visit, part, side_outputs, values, inner, modes, sends)
        self._state.begin(visit.stage)
        try:
            with values if follows else nullcontext():
                yield
        finally:
            inner.end()
            side_outputs.end()
            values.end_step(self._module)
            self._running = None
            self._state.end(visit.stage)

    def end_step(self, visit: Visit, output: Any, may_call_none: bool = False) -> None:
        """Check at the end of a step that it has called every layer.

        Args:
            visit: the micro-batch.
            output: what the step returned.
            may_call_none: whether a step may do without the layers, on all stages alike.
        """
        if self._running is not None:
            self._running.values.read(output)
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
            visit, part = running.visit, running.part
            if index != visit.next_layer or visit.received.is_empty:
                self._refuse_call(visit, index)
            visit.next_layer += 1
            if index < part.start:
                return _replacement(running, index, args, kwargs)
            with paused(running.modes) if running.modes else nullcontext():
                if index == part.stop:
                    raise StageEdge(_activation(running))
                if index == part.start:
                    self._begin(running)
                return self._run(running, index, compute, args, kwargs)

        return forward

    def _run_backward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, which the user's step runs itself where it begins in a step."""
        running = self._running
        if running is None:
            return own(*args, **kwargs)
        return running.inner.run(own, *args, **kwargs)

    def _begin(self, running: _Running) -> None:
        """Prepare for the stage's own layers."""
        if running.sends:
            running.side_outputs.watch(running.part)
        running.values.begin_stage()
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
        if not running.sends and running.visit.reads is None:
            return self._compute(running.visit, index, compute, args, kwargs)
        if running.sends:
            running.side_outputs.begin_layer(index)
        observed: AbstractContextManager[None] = nullcontext()
        if running.visit.reads is not None:  # What the layer reads is to be learned.
            is_compiled = self._watched[index].compiled
            observed = running.values.computing_layer((args, kwargs), is_compiled)
        with observed:
            output = self._compute(running.visit, index, compute, args, kwargs)
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
            visit.segment = Segment(checkpointing.device, self._state.remember, checkpointing.count)
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

    def _refuse_call(self, visit: Visit, index: int) -> NoReturn:
        if visit.received.is_empty:
            raise MisconfigurationException(
                f"The step called layer {self.names[index]!r} on stage {visit.stage}, and no layer "
                "on the stage before it. Whether it calls the layers must depend on what all "
                "stages have: the batch, its index, the epoch." + see("steps")
            )
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
@never_compiled
def _note_output(running: _Running, index: int, output: Any) -> None:
    """Note the output of a layer that this stage has computed, and what the layer has set."""
    running.side_outputs.end_layer(index)
    running.values.end_layer(index, output)


@never_compiled
def _activation(running: _Running) -> Activation:
    """What a stage sends when the step calls the next stage's first layer."""
    return running.values.sent()._replace(side_outputs=running.side_outputs.to_send())


@never_compiled
def _replacement(
    running: _Running, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a layer of an earlier stage returns on this one."""
    for unused in (*args, *kwargs.values()):
        await_collective(unused)
    running.inner.give(args, kwargs)
    if running.visit.received.side_outputs:
        with running.values.replaying():
            running.side_outputs.replay(index)
    output = running.visit.received.output
    is_received = index == running.part.start - 1
    with paused(running.modes):
        return running.values.replace_output(index, output if is_received else described(output))
