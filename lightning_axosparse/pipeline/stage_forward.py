"""Replaces the ``forward`` of pipelined layers, so that a user's step computes one stage of them.

Every stage runs the user's whole step on the whole module. Calling a layer does the following:

    layer of an earlier stage    computes nothing, returns the activation that was received
    layer of the stage           computes, with activation checkpointing if that is configured
    layer of a later stage       ends the step by raising ``StageEdge``

The return of the last layer also ends the step: the end of the step runs once, on the whole batch,
as one more stage without layers, in which every layer is replaced (``step_end``). Only by parts,
the step continues behind the last layer. ``skip_tensors`` sends the values that code between layers
has computed, ``side_outputs`` those of hooks and attributes of earlier layers, if later stages read
them (``message``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.backward.inner_backward import InnerBackward
from lightning_axosparse.pipeline.backward.recompute import (
    ActivationCheckpointing,
    Segment,
    without_reentrant_checkpoints,
)
from lightning_axosparse.pipeline.crossing.message import Activation
from lightning_axosparse.pipeline.crossing.placeholder import with_descriptions
from lightning_axosparse.pipeline.crossing.side_outputs import SideOutputs, WatchedLayer
from lightning_axosparse.pipeline.crossing.skip_tensors import DerivedValues, unnumbered
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.support.object_trees import object_leaves
from lightning_axosparse.support.patched import patched, replaced_forward
from lightning_axosparse.support.torch_internals import (
    PausableMode,
    PausableOperatorMode,
    await_collective,
    backward_passes_by,
    in_func_transform,
    never_compiled,
    not_compiled,
    paused,
    plain_torch_functions,
)
from lightning_axosparse.support.troubleshooting import see

Mode = PausableMode | PausableOperatorMode


class StageEdge(BaseException):
    """Ends a step before the next stage's layers; no ``except Exception`` swallows it."""

    def __init__(self, activation: Activation) -> None:
        super().__init__("the edge of a pipeline stage")
        self.activation = activation


class _CurrentRun(NamedTuple):
    """The present run of the step, with the records of its values.

    Attributes:
        run: the run.
        part: indices of the stage's layers; empty for the end of the step.
        side_outputs: records side outputs of layers.
        values: records derived values.
        inner: runs the backward passes of the step itself.
        modes: modes that observe the step, but not the layers.
        contexts: contexts that end with the run.
    """

    run: StepRun
    part: range
    side_outputs: SideOutputs
    values: DerivedValues
    inner: InnerBackward
    modes: Sequence[Mode]
    contexts: ExitStack


class PipelinedLayers:
    """The layers of a module, partitioned into stages.

    Attributes:
        remember: called with a layer that is about to be computed, and may be recomputed in its
            backward pass; returns a function that makes a context in which the layer has its
            present attributes.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        parts: Sequence[range],
        checkpointing: ActivationCheckpointing | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.names, self.layers, self.parts = list(names), list(layers), list(parts)
        self._parts_and_end = [*self.parts, range(len(self.layers), len(self.layers))]
        self.remember: Callable[[nn.Module], Callable[[], AbstractContextManager[None]]]
        self.remember = lambda layer: nullcontext
        self._checkpointing = checkpointing
        self._module = nn.ModuleList(layers) if module is None else module
        self._buffers: dict[int, str] = {}
        self._current: _CurrentRun | None = None
        self._computed: str | None = None
        """The name of the layer that is being computed."""
        self._watched: list[WatchedLayer] = []
        self._inside: list[tuple[nn.Module | str, ...]] = []
        """The modules inside the layers, each with the names of its parameters."""
        self._present: set[int] = set()
        self._undo = ExitStack()

    @property
    def end(self) -> int:
        """The number of the stage behind all layers: the end of the step."""
        return len(self.parts)

    def part(self, stage: int) -> range:
        """Return the indices of a stage's layers; empty for the end of the step."""
        return self._parts_and_end[stage]

    def install(self, stages: Sequence[int]) -> None:
        """Replace the ``forward`` of all layers, and check backward passes that steps run.

        Args:
            stages: those of this rank.
        """
        self._undo.enter_context(backward_passes_by(self._run_backward))
        self._undo.enter_context(without_reentrant_checkpoints())
        self._present = {layer for stage in stages for layer in self.parts[stage]}
        self.record_modules()
        self._watch()
        places: dict[nn.Module, list[int]] = {}
        for index, layer in enumerate(self.layers):
            places.setdefault(layer, []).append(index)
        for layer, indices in places.items():
            self._undo.enter_context(replaced_forward(layer, partial(self._forward, indices)))
        within = {part for layer in self.layers for part in layer.modules()}
        for part in self._module.modules():
            # In evaluation it gives its layers nested tensors, which cannot be sent or joined.
            if isinstance(part, nn.TransformerEncoder) and part not in within:
                self._undo.enter_context(patched(part, "use_nested_tensor", False))

    def validate_places(self) -> None:
        """Check that the layers are still in their places in the module."""
        present = dict(self._module.named_modules(remove_duplicate=False))
        for name, layer in zip(self.names, self.layers, strict=True):
            if present.get(name, layer) is not layer:
                raise MisconfigurationException(
                    f"A hook has replaced or removed layer {name!r} of the pipeline, whose stages "
                    "are formed before on_fit_start. Change layers in __init__, setup or "
                    "configure_model, or change the modules inside the layer." + see("steps")
                )

    def record_modules(self) -> None:
        """Record the modules inside the layers, which hooks may change before the next step."""
        parts = [part for layer in self.layers for part in layer.modules()]
        self._inside = [
            (part, *(name for name, _ in part.named_parameters(recurse=False))) for part in parts
        ]

    def follow_changes(self) -> bool:
        """Watch the modules that layers have now; return whether hooks have changed them."""
        before = self._inside
        self.record_modules()
        if self._inside == before:
            return False
        self._watch()
        return True

    def _watch(self) -> None:
        self._watched = list(map(WatchedLayer, self.names, self.layers))
        buffers = dict(self._module.named_buffers())
        self._buffers = {id(buffer): name for name, buffer in buffers.items()}

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        self._undo.close()
        self._buffers.clear()

    @contextmanager
    def running(
        self, run: StepRun, modes: Sequence[Mode] = (), written: Sequence[object] = ()
    ) -> Iterator[None]:
        """Run the step inside the context, and compute the layers of ``run.stage``.

        Args:
            run: the run.
            modes: modes that observe the step, but not the layers.
            written: paths of the tensors outside the layers to which ``modes`` see writes.
        """
        part, run.progress.stage = self._parts_and_end[run.stage], run.stage
        # The end of the step changes the module's own tensors.
        changes = ({}, ()) if run.sent is None else (self._buffers, written)
        values = DerivedValues(run, part, *changes, self.names)
        side_outputs = SideOutputs(run, self._watched, values)
        modes = [*modes, values] if values.follows else modes
        modes = modes if run.draws is None else [run.draws, *modes]
        entered = modes if run.front is None else [*modes, run.front]
        if run.front is not None and run.front.replaces:
            modes = entered
        earlier = self.layers[: part.start]
        inner = InnerBackward(self._module.parameters, run.received_tensors, earlier)
        contexts = ExitStack()
        self._current = _CurrentRun(run, part, side_outputs, values, inner, modes, contexts)
        try:
            with contexts:
                for mode in entered:
                    contexts.enter_context(mode)
                yield
        finally:
            inner.end()
            side_outputs.end()
            if run.reads is not None:
                values.end_probe(self._module)
            self._current = None

    def end_step(self, run: StepRun, output: Any, may_call_none: bool = False) -> None:
        """Check at the end of a step that it has called every layer.

        Args:
            run: the run.
            output: the output of the step.
            may_call_none: whether the step may call no layer at all, alike on all stages.
        """
        if self._current is not None:
            self._current.values.record_output(output)
        called_none = run.next_layer == 0 and (run.stage == 0 or run.received.content.is_empty)
        if run.next_layer < len(self.layers) and not (may_call_none and called_none):
            self.validate_places()
            raise MisconfigurationException(
                f"The step returned without calling layer {self.names[run.next_layer]!r} of the "
                "pipelined container. In a pipeline every step has to call every layer once, in "
                "order; networks that only some steps call, such as a teacher, stay outside if you "
                "name the others: pipeline='student'." + see("steps")
            )

    def _forward(self, places: Sequence[int], compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of a layer's forward; a layer may be at several ``places``."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            current = self._current
            if current is None:
                return self._outside_step(places, compute, *args, **kwargs)
            if in_func_transform():
                self._refuse_transform(places[0])
            run, part = current.run, current.part
            index = run.next_layer if run.next_layer in places else places[0]
            if index != run.next_layer or run.received.content.is_empty:
                self._refuse_call(run, index)
            run.next_layer += 1
            if index == 0 and run.at_first_layer is not None:
                current.side_outputs.first_arguments = (*args, *kwargs.values())
                args, kwargs = _first_inputs(current, args, kwargs)
            if index < part.start:
                output = _replacement(current, index, args, kwargs)
                if run.next_layer == len(self.layers):
                    current.values.begin_stage()
                    if run.behind_layers is not None:
                        current.contexts.enter_context(run.behind_layers(run))
                return output
            with paused(current.modes) if current.modes else nullcontext():
                if index == part.stop:
                    raise StageEdge(_activation(current))
                if index == part.start:
                    self._begin(current)
                if run.front is not None and run.front.replaces:
                    args, kwargs = run.front.replace((args, kwargs))
                output = self._run(current, index, compute, args, kwargs)
                if run.next_layer == len(self.layers):
                    if run.ends_behind_layers:
                        raise StageEdge(_activation(current))
                    if current.run.sent is not None:
                        run.sent_here = _activation(current)
                return output

        # The index of the next layer would become a symbol in what `layer.compile()` makes.
        return not_compiled(forward)

    def _refuse_transform(self, index: int) -> NoReturn:
        raise MisconfigurationException(
            f"Layer {self.names[index]!r} is called inside a transform of torch.func, such as vmap "
            "or grad, which cannot follow values from stage to stage. Transform functions inside a "
            "layer or behind the layers, or train on one stage: g_inter=1 with microbatches=1."
            + see("steps")
        )

    def _run_backward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; inside a run of the step, it is the user's."""
        current = self._current
        if current is None:
            return own(*args, **kwargs)
        return current.inner.run(own, *args, **kwargs)

    @never_compiled
    def _begin(self, current: _CurrentRun) -> None:
        """Prepare for the stage's own layers."""
        if current.run.sent is not None:
            current.side_outputs.watch(current.part)
        current.values.begin_stage()
        if current.run.seed_layers is not None:
            current.run.seed_layers()

    def _run(
        self,
        current: _CurrentRun,
        index: int,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a layer of the stage, and record its output and side outputs."""
        if current.run.sent is None and current.run.reads is None:
            return self._compute(current.run, index, compute, args, kwargs)
        given = [each for each in (*args, *kwargs.values()) if type(each) in (list, dict, set)]
        before = [_content(each) for each in given] if given else []
        if current.run.sent is not None:
            current.side_outputs.begin_layer(index, (*args, *kwargs.values()))
        observed: AbstractContextManager[None] = nullcontext()
        if current.run.reads is not None:  # A probe, which records the values that layers read.
            is_compiled = self._watched[index].compiled
            observed = current.values.computing_layer((args, kwargs), is_compiled)
        self._computed = self.names[index]
        try:
            with observed:
                if self._checkpointing is None:
                    output = compute(*args, **kwargs)
                else:
                    output = self._compute(current.run, index, compute, args, kwargs)
        finally:
            self._computed = None
        if output is None:
            raise MisconfigurationException(
                f"Layer {self.names[index]!r} returns None. Other ranks, and code behind the layers"
                ", do not see what it changes instead: let it return the result."
                + see("values-between-layers")
            )
        if given:
            self._validate_unchanged(index, given, before)
        if current.run.sent is not None:
            output = current.side_outputs.end_layer(index, output)
            current.values.end_layer(index, output)
        return output

    def refuse_inside(self, action: str) -> None:
        """Refuse an action if a layer is being computed, whose effects do not count."""
        if self._computed is not None:
            raise MisconfigurationException(
                f"Layer {self._computed!r} {action}. Layers run for each micro-batch, on the ranks "
                "of their stages, where logs and metrics do not count. Let the layer return the "
                "value or set it as an attribute, and do that behind the layers."
                + see("values-between-layers")
            )

    def _validate_unchanged(self, index: int, given: list[Any], before: list[list[Any]]) -> None:
        """Check that a layer has not changed a collection among its arguments."""
        for each, old in zip(given, before, strict=True):
            new = _content(each)
            if len(new) != len(old) or any(a is not b for a, b in zip(old, new, strict=True)):
                raise MisconfigurationException(
                    f"Layer {self.names[index]!r} changes a {type(each).__name__} that it is given."
                    " Layers on other ranks, and code behind the layers, would not see the change. "
                    "Let the layer return what it adds, or set it as an attribute of the layer."
                    + see("values-between-layers")
                )

    def _compute(
        self,
        run: StepRun,
        index: int,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a layer, with activation checkpointing if that is configured."""
        checkpointing = self._checkpointing
        if checkpointing is None or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        part = self.parts[run.stage]
        if run.segment is None or checkpointing.begins_segment(index - part.start, len(part)):
            run.segment = Segment(checkpointing.device, self.remember)
        return run.segment.run(self.names[index], self.layers[index], compute, args, kwargs)

    def _outside_step(
        self, places: Sequence[int], compute: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        # Activation checkpointing calls a layer again in the backward pass.
        if not self._present.isdisjoint(places):
            return compute(*args, **kwargs)
        raise RuntimeError(
            f"Layer {self.names[places[0]]!r} was called outside of training_step, "
            "validation_step, test_step and predict_step, but this rank holds only the layers "
            f"{[self.names[i] for i in sorted(self._present)]}. Call it after the run, when the "
            "module is whole again." + see("values-between-layers")
        )

    def _refuse_call(self, run: StepRun, index: int) -> NoReturn:
        if run.received.content.is_empty:
            raise MisconfigurationException(
                f"The step called layer {self.names[index]!r} on stage {run.stage}, and no layer "
                "on the stage before it. Whether it calls the layers must depend on what all "
                "stages have: the batch, its index, the epoch." + see("steps")
            )
        self.validate_places()
        called = self.names[index]
        expected = (
            f"layer {self.names[run.next_layer]!r} was next"
            if run.next_layer < len(self.layers)
            else "all layers had been called"
        )
        raise MisconfigurationException(
            f"Layer {called!r} was called where {expected}. In one step of a pipelined module each "
            "layer is called once, in the order of the container: no layer may be skipped at "
            "random, and the network may not be called twice: two views of a sample go through "
            "it together, `net(torch.cat([a, b])).chunk(2)`. If not every step calls all networks, "
            "such as a teacher, name those to pipeline: pipeline='student'." + see("steps")
        )


@never_compiled
def _first_inputs(
    current: _CurrentRun, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the first layer."""
    assert current.run.at_first_layer is not None
    with paused(current.modes):
        return current.run.at_first_layer(args, kwargs)


@never_compiled
def _activation(current: _CurrentRun) -> Activation:
    """Return the activation that a stage sends when the step reaches the next stage."""
    return current.values.activation()._replace(side_outputs=current.side_outputs.to_send())


@never_compiled
def _replacement(
    current: _CurrentRun, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the output, on this stage, of a layer of an earlier stage."""
    with plain_torch_functions():
        arguments = object_leaves((args, kwargs), Tensor)
        for unused in arguments:
            await_collective(unused)
        current.inner.record_arguments(arguments)
    received: Activation = current.run.received.content
    if received.side_outputs:
        with unnumbered():  # Hooks inside of layers are called again.
            current.side_outputs.replay(index, (*args, *kwargs.values()))
    is_received = index == current.part.start - 1
    output = received.output if is_received else with_descriptions(received.output)
    with paused(current.modes) if current.modes else nullcontext():
        return current.values.replace_output(index, output)


def _content(collection: Any) -> list[Any]:
    """Return the items of a list or set, or the keys and values of a dict."""
    return [*collection, *(collection.values() if type(collection) is dict else ())]
