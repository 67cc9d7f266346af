"""Sends the values between layers that later stages read, such as skip connections.

A step may do more with a layer's output than pass it to the next layer: add it to a later one, pool
it, store it for a decoder. Every stage runs this code and numbers the results that derive from
outputs of layers; as all stages run the same code, they give the same numbers (``Place``).

    stage that computed the layer   computes the results, until the step calls a layer of the next
                                    stage; then it sends those that later stages read
    later stage                     computes none of them: a call of a function returns the received
                                    result of its number, or a placeholder

For example, on two stages of one layer each:

    h = self.layers[0](x)    stage 0 computes h                 stage 1 takes the received h
    skip = h.mean(1)         stage 0 computes result 1          stage 1 takes the received result 1
    scaled = 2 * h           stage 0 computes result 2          stage 1 makes a placeholder
    y = self.layers[1](h)    stage 0 sends h and result 1       stage 1 computes y
    return y + skip                                             the end of the step adds

So residual streams, skip connections and the states of an encoder are sent with their gradients.
Where each layer's output goes to the next layer alone, nothing else is sent, and results are not
even numbered. A probe, in which every value is sent, records which ones a stage reads
(``message``): those that are passed to a layer of the stage, to a function that the stage computes
or to code that needs a number; those that the step returns; and those that can be reached from an
attribute of the module after the step.

A value is sent as it is when the step calls the next stage's first layer, with all changes in place
until then, which later stages do not repeat.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.pipeline.crossing.front_values import READS
from lightning_axosparse.pipeline.crossing.message import Activation, Place, SidePlace, Value
from lightning_axosparse.pipeline.crossing.placeholder import (
    GRADIENT_HOOKS,
    LEAVES,
    Outcome,
    Placeholder,
    TensorDescription,
    alias_of,
    attribute_tensors,
    computed_from,
    reachable_objects,
    run_on_meta,
    sendable,
    values_in,
    with_descriptions,
    with_tensors,
)
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.support.object_trees import object_leaves, object_map
from lightning_axosparse.support.torch_internals import (
    PausableMode,
    entered_modes,
    never_compiled,
    plain_torch_functions,
    tensors_in,
    version_of,
)
from lightning_axosparse.support.troubleshooting import see


class _Tracked(NamedTuple):
    """A tensor that was computed from outputs of layers, or belongs to a side output.

    Attributes:
        tensor: the tensor.
        place: where the step computed it first; None for a tensor of a side output.
        sources: the received values of which the tensor is one, or from which it was computed.
        is_final: whether it has all changes in place of an earlier stage, so that they are not
            repeated here.
    """

    tensor: weakref.ref[Tensor]
    place: Place | None
    sources: frozenset[Value] = frozenset()
    is_final: bool = False


@contextmanager
def unnumbered() -> Iterator[None]:
    """Number no results inside the context, whose code does not run on every stage, such as logs.

    Hooks inside of layers, which later stages call again, have no numbers either.
    """
    followed = [mode for mode in entered_modes() if isinstance(mode, DerivedValues)]
    before = [values.is_unnumbered for values in followed]
    for values in followed:
        values.is_unnumbered = True
    try:
        yield
    finally:
        for values, was in zip(followed, before, strict=True):
            values.is_unnumbered = was


class DerivedValues(PausableMode):
    """The values between layers of one micro-batch on one stage.

    It is a mode, to be entered around the step if ``follows`` is set.

    Args:
        run: the run of the step; in a probe, its ``reads`` records the values that the stage reads.
        part: indices of the stage's layers.
        buffers: names of the buffers that may not change between layers, by ``id``.
        written: paths of the tensors outside the layers to which operators have written.
        names: of all layers.
    """

    def __init__(
        self,
        run: StepRun,
        part: range,
        buffers: Mapping[int, str],
        written: Sequence[object],
        names: Sequence[str],
    ) -> None:
        super().__init__()
        received, sent = run.received.content, run.sent
        self._progress, self._reads, self._last = run.progress, run.reads, part.stop - 1
        self._numbers = run.numbers
        self._received, self._forms = dict(received.values), dict(received.forms)
        self._buffers, self._written, self._names = buffers, written, names
        self._sends = sent is not None
        self._sent_values: Any = () if sent is None else sent.values
        self._follows_stage = sent is not None and (
            # Without versions, only functions show that the step changes a value.
            sent.last_computed >= part.start or torch.is_inference_mode_enabled()
        )
        self.follows = bool(
            self._follows_stage
            or received.values
            or received.is_changed
            or received.side_outputs
            or run.reads is not None
        )
        """Whether functions between layers have to be followed."""
        self._tracked: dict[int, _Tracked] = {}
        self._to_send: dict[Place, Tensor] = {}
        self._layer, self._results = -1, 0
        self._versions: list[tuple[Tensor, int]] = []
        self._reduced: list[tuple[Tensor, int]] = []
        """Tensors of which single numbers were computed, with their versions then."""
        self._received_output = received.output
        self._is_changed = self._is_in_layer = False
        self.is_unnumbered = False
        """Whether results have no numbers now, as in :func:`unnumbered`."""

    def begin_stage(self) -> None:
        """From now on, the stage computes values itself."""
        self._progress.is_before_stage = False
        if not self._follows_stage and self._reads is None:
            self._tracked.clear()

    @never_compiled
    def end_layer(self, index: int, output: Any) -> None:
        """Record the output of a layer that this stage has computed."""
        self._layer, self._results = index, 0
        self._record_result(output)
        if index == self._last:
            self._forms[index] = with_descriptions(output)
            outputs = object_leaves(output, Tensor)
            self._versions += [(tensor, version_of(tensor)) for tensor in outputs]
            if index < len(self._names) - 1:
                for tensor in outputs:
                    if not tensor.is_leaf:  # The next stage registers it, for the same gradient.
                        tensor.register_hook = _register_nothing
        else:
            self._forms[index] = self._form(output, index)

    def _form(self, output: Any, layer: int) -> Any:
        """Return a layer's output with descriptions in place of its tensors."""
        if isinstance(output, Tensor):
            return TensorDescription.of(output)
        return sendable(output, lambda leaf: False, self._names[layer])

    def replace_output(self, index: int, output: Any) -> Any:
        """Return the output of a layer of an earlier stage, with its received tensors.

        Args:
            index: of the layer.
            output: the received output, if the layer is the previous stage's last; else that output
                with descriptions of its tensors, the form of all layers that sent no other.
        """
        self._layer, self._results = index, 0
        if (form := self._forms.get(index)) is not None:
            output = form
        elif self._sends:
            self._forms[index] = with_descriptions(output)
        return self._with_received(output)

    def activation(self) -> Activation:
        """Return the message to the next stage, without side outputs."""
        layer, values = self._layer, self._to_send
        last = self._forms.pop(layer)
        for place, tensor in self._received.items():
            if place in self._sent_values:
                values.setdefault(place, tensor)
        if isinstance(last, TensorDescription):
            output = values.pop(Place(layer, 0, 0), last)
        else:
            leaves = (Place(layer, 0, leaf) for leaf in count())
            output = object_map(LEAVES, lambda form: values.pop(next(leaves), form), last)
            last = self._form(last, layer)
        forms = tuple((index, form) for index, form in self._forms.items() if form != last)
        for tensor, version in self._versions:
            self._is_changed |= version_of(tensor) != version
        if any(version_of(tensor) != version for tensor, version in self._reduced):
            raise MisconfigurationException(
                f"Up to layer {self._names[layer]!r}, the step changes a tensor in place of which "
                "it has computed a single number before, such as a mean. Other stages get the "
                "changed tensor, and would compute another number. Make a new tensor, "
                "`h = h + 1` in place of `h += 1`." + see("values-between-layers")
            )
        return Activation(
            output, tuple(values.items()), forms, self._is_changed, numbers=tuple(self._numbers)
        )

    def alias(self, received: Tensor, place: SidePlace) -> Tensor:
        """Return, for the step, an alias of a received tensor of a side output."""
        alias = alias_of(received)
        if self.follows:
            self._track(alias, None, frozenset([place]), is_final=True)
        return alias

    def keep_arguments(self, call: SidePlace) -> bool:
        """Whether an argument of a call of a hook, or a value computed from it, still exists."""
        return any(
            entry.tensor() is not None
            and any(isinstance(s, SidePlace) and s.whole == call for s in entry.sources)
            for entry in self._tracked.values()
        )

    @contextmanager
    def computing_layer(self, inputs: Any, is_compiled: bool) -> Iterator[None]:
        """Record inside the context the values that a layer reads, although the mode is paused."""
        self._record_read(self._find_all(reachable_objects(inputs)))
        if is_compiled:
            yield
            return
        before, self._is_paused, self._is_in_layer = self._is_paused, False, True
        try:
            with self:
                yield
        finally:
            self._is_paused, self._is_in_layer = before, False

    def record_output(self, output: Any) -> None:
        """Record the values that the step has returned as read."""
        if self._reads is not None:
            self._record_read(self._find_all(reachable_objects(output)))

    def end_probe(self, module: nn.Module) -> None:
        """Record the values to which the module refers after the step as read, in a probe.

        An attribute that a layer has set may be as large as attentions, and nothing may read it: it
        counts only if it is no larger than the output of a layer.
        """
        outputs = object_leaves(self._received_output, Tensor)
        largest = sum(output.nbytes for output in outputs)
        for tensor in attribute_tensors(module):
            entry = self._find(tensor)
            if entry is None:
                continue
            is_attribute = any(isinstance(s, SidePlace) and s.of_attribute for s in entry.sources)
            if not is_attribute or tensor.nbytes <= largest:
                self._record_read([entry])

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function, or return the result that an earlier stage has computed."""
        arguments = self._find_all(tensors_in((args, kwargs))) if self._tracked else []
        if not arguments:
            return func(*args, **kwargs)
        if self._progress.is_before_stage:
            return self._before_stage(func, args, kwargs, arguments)
        if self._reads is not None and any(entry.sources for entry in arguments):
            outcome = run_on_meta(func, args, kwargs)
            if outcome is None or outcome.makes_tensors or outcome.changed:
                self._record_read(arguments)
        if (
            self._is_in_layer
            or self.is_unnumbered
            or all(entry.place is None for entry in arguments)
        ):
            return func(*args, **kwargs)
        return self._between_layers(func, args, kwargs)

    def _between_layers(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function between layers of this stage, and record its result."""
        self._results += 1
        tensors = tensors_in((args, kwargs))
        # Running statistics change without a new version.
        buffers = [(each, each.clone()) for each in tensors if id(each) in self._buffers]
        written = len(self._written)
        result = func(*args, **kwargs)
        changed = [self._buffers[id(each)] for each, old in buffers if not torch.equal(each, old)]
        changed += [str(path).removeprefix("self.") for path in self._written[written:]]
        if self._layer < len(self._names) - 1:
            if changed:
                self._refuse(changed[0])
            if func in READS:
                self._add_number(result)
            self._note_reduced(func, result, tensors)
        given = set(map(id, tensors))
        if result is None or any(id(tensor) in given for tensor in tensors_in(result)):
            self._is_changed = True
        argument = _changed_argument(func, args)
        self._record_result(result if argument is None else argument)
        return result

    def _before_stage(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        arguments: Sequence[_Tracked],
    ) -> Any:
        """Return the result of a function that an earlier stage has computed."""
        counts = not self.is_unnumbered and any(entry.place is not None for entry in arguments)
        self._results += counts
        outcome = run_on_meta(func, args, kwargs)
        if (
            outcome is None
            or (counts and outcome.makes_scalar)  # Hooks inside of layers are called again.
            or not self._copy_changes(outcome, _changed_argument(func, args))
        ):
            # It has to be computed again.
            self._record_read(arguments)
            result = func(*args, **kwargs)
            if counts and func in READS:
                self._add_number(result)
            self._note_reduced(func, result, tensors_in((args, kwargs)))
            for leaf, value in enumerate(tensors_in(result) if counts else ()):
                self._track(value, Place(self._layer, self._results, leaf))
            return result
        if not (outcome.makes_tensors or outcome.changed):
            if func in GRADIENT_HOOKS:
                return outcome.result
            if outcome.returns_argument:
                return self._with_received(outcome.result) if counts else outcome.result
            with plain_torch_functions():
                return func(*args, **kwargs)
        if counts:
            return self._with_received(outcome.result)
        if outcome.changed:
            return outcome.result
        result = func(*args, **kwargs)
        sources = frozenset(source for entry in arguments for source in entry.sources)
        for tensor in tensors_in(result):
            if self._find(tensor) is None:
                self._track(tensor, None, sources)
        return result

    def _note_reduced(
        self, func: Callable[..., Any], result: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Note that a function has computed a single number, which later stages compute again."""
        is_number = func in READS or (isinstance(result, Tensor) and not result.dim())
        if is_number and self._sends:
            self._reduced += [(each, version_of(each)) for each in tensors if each.dim()]

    def _add_number(self, number: Any) -> None:
        self._numbers.append(number)
        if self._reads is not None:
            self._reads.numbers = True

    def _copy_changes(self, outcome: Outcome, changed: Tensor | None) -> bool:
        """Copy received values into the arguments that an earlier stage has changed in place.

        Args:
            outcome: the effects of the function that changes them.
            changed: the argument that the function changes and does not return, if any.

        Returns:
            Whether all changed arguments now have the values of the earlier stage.
        """
        leaves = values_in(outcome.result if changed is None else changed)
        for tensor in outcome.changed:
            entry = self._find(tensor)
            if entry is not None and entry.is_final:
                continue
            leaf = next((leaf for leaf, value in enumerate(leaves) if value is tensor), None)
            place = Place(self._layer, self._results, -1 if leaf is None else leaf)
            if entry is not None or self.is_unnumbered or place not in self._received:
                return False
            # No placeholder can take its place, so it is always sent.
            tensor.copy_(self._received[place])
            self._track(tensor, place, frozenset([place]), is_final=True)
            if place in self._sent_values:
                self._to_send[place] = tensor
            self._record_read([self._tracked[id(tensor)]])
        return True

    def is_received(self, tensor: Tensor) -> bool:
        """Whether an earlier stage has computed a tensor, which may be a placeholder."""
        return self._find(tensor) is not None

    def is_numbered(self, tensor: Tensor) -> bool:
        """Whether functions of a tensor have numbers."""
        entry = self._find(tensor)
        return entry is not None and entry.place is not None

    def _find(self, tensor: Tensor) -> _Tracked | None:
        entry = self._tracked.get(id(tensor))
        return entry if entry is not None and entry.tensor() is tensor else None

    def _find_all(self, values: Iterable[Any]) -> list[_Tracked]:
        return [entry for value in values if (entry := self._find(value)) is not None]

    def _record_read(self, entries: Iterable[_Tracked]) -> None:
        if self._reads is not None:
            for entry in entries:
                self._reads.read |= entry.sources

    def _track(
        self,
        tensor: Tensor,
        place: Place | None,
        sources: frozenset[Value] = frozenset(),
        is_final: bool = False,
    ) -> None:
        self._tracked[id(tensor)] = _Tracked(weakref.ref(tensor), place, sources, is_final)

    def _record_result(self, result: Any) -> None:
        """Record the tensors in a result that this stage has computed."""
        leaves = (result,) if isinstance(result, Tensor) else object_leaves(result, Tensor)
        for leaf, value in enumerate(leaves):
            place = Place(self._layer, self._results, leaf)
            if place in self._sent_values:
                self._to_send[place] = value
            if self.follows and self._find(value) is None:
                self._track(value, place)

    def _with_received(self, result: Any) -> Any:
        """Return a result of an earlier stage with received tensors, or with placeholders.

        Args:
            result: its new tensors are descriptions; tensors in it are arguments of the function.
        """
        return with_tensors(result, self._received_or_placeholder)

    def _received_or_placeholder(self, leaf: int, value: Tensor | TensorDescription) -> Tensor:
        place = Place(self._layer, self._results, leaf)
        known = self._received.get(place, value)
        # An argument that the function returns, unless a received tensor replaces a placeholder.
        if (
            self._results
            and isinstance(value, Tensor)
            and not (isinstance(value, Placeholder) and known is not value)
        ):
            return value
        if isinstance(known, TensorDescription):
            source = f"the output of layer {self._names[self._layer]!r}"
            source = computed_from(source) if self._results else source
            tensor: Tensor = Placeholder.of(known, self._progress, source)
        else:
            tensor = alias_of(known)
            if place in self._sent_values:
                self._to_send[place] = tensor
        if self.follows:
            self._track(tensor, place, frozenset([place]), is_final=True)
        return tensor

    def _refuse(self, name: str) -> None:
        raise MisconfigurationException(
            f"{name!r} changes between layers {self._names[self._layer]!r} and "
            f"{self._names[self._layer + 1]!r}, by values that only one stage sees. Make its "
            "module a layer, too: AxoSparseStrategy(pipeline=[...]) takes several containers and "
            "modules in the order in which they are called." + see("values-between-layers")
        )


def _changed_argument(func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
    """Return the argument that a function changes and does not return, if there is one."""
    return args[0] if func is Tensor.__setitem__ else None


def _register_nothing(hook: Callable[..., Any]) -> RemovableHandle:
    return RemovableHandle(OrderedDict())
