"""Sends what later stages read of the values that a step computes between its layers.

A step may do more with a layer's output than give it to the next layer: add it to a later one, pool
it, keep it for a decoder. Every stage runs this code, and numbers the results that derive from
outputs of layers; as it is the same code, so are the numbers.

    stage that computed the layer   makes the results, and goes on until the step calls a layer of
                                    the next stage; then it sends the values that later stages read
    later stage                     computes none of it again: where its own run of the code makes
                                    the result of a number that it has received, that is the result;
                                    all others are placeholders

So a residual stream, a skip connection and the states of an encoder cross the edges of stages, with
their gradients, and a network that gives each layer's output to the next layer alone sends nothing
else; then the results are not even numbered. What a stage reads is seen in a run in which
everything is sent (``message``). A value has been read where a function that the stage computes
takes it, a layer of the stage, or code that needs a number; where the step returns it; and where it
can be reached from an attribute of the module after the step.

A value is sent as it is when the step calls the next stage's first layer, so that code that changes
it in place has no effect on later stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.crossing.message import (
    Activation,
    Place,
    Reads,
    Sent,
    SidePlace,
    Value,
)
from lightning_axosparse.pipeline.crossing.placeholder import (
    GRADIENT_HOOKS,
    Outcome,
    Placeholder,
    Progress,
    Unsent,
    attribute_tensors,
    computed_from,
    described,
    filled,
    nodes,
    sendable,
    values_in,
    without_values,
)
from lightning_axosparse.support.object_trees import object_leaves
from lightning_axosparse.support.torch_internals import (
    PausableMode,
    plain_torch_functions,
    tensors_in,
    version_of,
)
from lightning_axosparse.support.troubleshooting import see


class _Made(NamedTuple):
    """A value that derives from what layers have computed.

    Attributes:
        tensor: the value.
        place: where the step made it first; None if hooks or attributes of layers hold it.
        sources: what was received from the previous stage, if it is that or was made of that.
        is_final: whether it is as an earlier stage has left it, whatever the step does to it here.
    """

    tensor: weakref.ref[Tensor]
    place: Place | None
    sources: frozenset[Value] = frozenset()
    is_final: bool = False


class _Alias(torch.autograd.Function):
    """A received tensor as the step gets it: it is no leaf, so that it may change in place."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def alias_of(received: Tensor) -> Tensor:
    """The same values as a tensor that is no leaf of the graph."""
    alias: Tensor = _Alias.apply(received)  # type: ignore[no-untyped-call]
    return alias


class DerivedValues(PausableMode):
    """The values of one micro-batch on one stage; to be entered round its step if it follows them.

    ``sent`` is None on the last stage. ``buffers`` are names by ``id``. ``reads`` is filled with
    what the stage reads; it is None where that is known.
    """

    def __init__(
        self,
        progress: Progress,
        part: range,
        received: Activation,
        sent: Sent | None,
        buffers: Mapping[int, str],
        names: Sequence[str],
        reads: Reads | None,
    ) -> None:
        super().__init__()
        self._progress, self._last = progress, part.stop - 1
        self._received, self._forms = dict(received.values), dict(received.forms)
        self._buffers, self._names, self._reads = buffers, names, reads
        self._sends = sent is not None
        self._sent: Any = () if sent is None else sent.values
        self._own = sent is not None and (
            # Without versions, only functions show that the step changes a value.
            sent.last_computed >= part.start or torch.is_inference_mode_enabled()
        )
        self.follows = bool(
            self._own
            or received.values
            or received.is_changed
            or received.side_outputs
            or reads is not None
        )
        """Whether functions between layers have to be followed."""
        self._made: dict[int, _Made] = {}
        self._held: dict[Place, Tensor] = {}
        self._layer, self._results = -1, 0
        self._versions: list[tuple[Tensor, int]] = []
        self._received_output = received.output
        self._is_changed = self._counts_none = self._is_in_layer = False

    def begin_stage(self) -> None:
        """Take in that from now on values are made, not received."""
        self._progress.is_before_stage = False
        if not self._own and self._reads is None:
            self._made.clear()

    def end_layer(self, index: int, output: Any) -> None:
        """Note the output of a layer that this stage has computed."""
        self._layer, self._results = index, 0
        self._note(output)
        if index == self._last:
            self._forms[index] = described(output)
            outputs = object_leaves(output, Tensor)
            self._versions += [(tensor, version_of(tensor)) for tensor in outputs]
        else:
            self._forms[index] = self._form(output, index)

    def _form(self, output: Any, layer: int) -> Any:
        """What a layer's output looks like."""
        if isinstance(output, Tensor):
            return Unsent.of(output)
        return sendable(output, lambda leaf: False, self._names[layer])

    def replace_output(self, index: int, output: Any) -> Any:
        """Return the output of a layer of an earlier stage, with what was received of it.

        Args:
            index: of the layer.
            output: what the previous stage sent of it, if that is its last layer; else what its
                last layer's looks like, unless this one's looks different.
        """
        self._layer, self._results = index, 0
        if (form := self._forms.get(index)) is not None:
            output = form
        elif self._sends:
            self._forms[index] = described(output)
        return self._filled(output)

    def sent(self) -> Activation:
        """What is sent when the step calls the next stage's first layer, but for side outputs."""
        layer = self._layer
        last = self._forms.pop(layer)
        held = self._held
        for place, tensor in self._received.items():
            if place in self._sent:
                held.setdefault(place, tensor)
        if isinstance(last, Unsent):
            output = held.pop(Place(layer, 0, 0), last)
        else:
            output = filled(last, lambda leaf, form: held.pop(Place(layer, 0, leaf), form))
            last = self._form(last, layer)
        forms = tuple((index, form) for index, form in self._forms.items() if form != last)
        for tensor, version in self._versions:
            self._is_changed |= version_of(tensor) != version
        return Activation(output, tuple(held.items()), forms, self._is_changed)

    def alias(self, received: Tensor, place: SidePlace) -> Tensor:
        """Return what the step gets for a tensor of a hook's or an attribute's."""
        alias = alias_of(received)
        if self.follows:
            self._track(alias, None, frozenset([place]), is_final=True)
        return alias

    def holds(self, call: SidePlace) -> bool:
        """Whether something keeps what a hook was given in a call, or has made of it."""
        return any(
            made.tensor() is not None
            and any(isinstance(s, SidePlace) and s.whole == call for s in made.sources)
            for made in self._made.values()
        )

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Number no results inside the context, where hooks inside of layers are called again."""
        self._counts_none = True
        try:
            yield
        finally:
            self._counts_none = False

    @contextmanager
    def computing_layer(self, inputs: Any, is_compiled: bool) -> Iterator[None]:
        """See inside the context, to which the mode was paused, what a layer of the stage reads."""
        self._read(self._sources(nodes(inputs)))
        if is_compiled:
            yield
            return
        before, self._is_paused, self._is_in_layer = self._is_paused, False, True
        try:
            with self:
                yield
        finally:
            self._is_paused, self._is_in_layer = before, False

    def read(self, tree: Any) -> None:
        """Note that the step has returned something."""
        if self._reads is not None:
            self._read(self._sources(nodes(tree)))

    def end_step(self, module: nn.Module) -> None:
        """Note what the module refers to after the step, of what other code may read.

        An attribute that a layer has set may be as large as attentions, and nothing may read it: it
        is sent if it is no larger than the output of a layer.
        """
        if self._reads is None:
            return
        outputs = object_leaves(self._received_output, Tensor)
        largest = sum(output.nbytes for output in outputs)
        for tensor in attribute_tensors(module):
            for made in self._sources([tensor]):
                is_attribute = any(isinstance(s, SidePlace) and not s.of_hook for s in made.sources)
                if not is_attribute or tensor.nbytes <= largest:
                    self._read([made])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or not self._made or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        sources = self._sources(tensors_in((args, kwargs)))
        if not sources:
            return func(*args, **kwargs)
        if self._progress.is_before_stage:
            return self._before_stage(func, args, kwargs, sources)
        if self._reads is not None and any(made.sources for made in sources):
            outcome = without_values(func, args, kwargs)
            if outcome is None or outcome.makes_tensors or outcome.changed:
                self._read(sources)
        if self._is_in_layer or all(made.place is None for made in sources):
            return func(*args, **kwargs)
        self._results += 1
        # Running statistics change without a new version.
        buffers = [(b, b.clone()) for b in tensors_in((args, kwargs)) if id(b) in self._buffers]
        result = func(*args, **kwargs)
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                self._refuse(buffer)
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        if result is None or any(id(tensor) in given for tensor in tensors_in(result)):
            self._is_changed = True
        first = _changed_first(func, args)
        self._note(result if first is None else first)
        return result

    def _before_stage(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        sources: Sequence[_Made],
    ) -> Any:
        """What a function returns that an earlier stage has computed."""
        counts = not self._counts_none and any(made.place is not None for made in sources)
        self._results += counts
        outcome = without_values(func, args, kwargs)
        if (
            outcome is None
            or (counts and _makes_scalar(outcome))  # Hooks inside of layers are called again.
            or not self._take_changes(outcome, _changed_first(func, args))
        ):
            # It has to be computed again.
            self._read(sources)
            result = func(*args, **kwargs)
            for leaf, value in enumerate(tensors_in(result) if counts else ()):
                self._track(value, Place(self._layer, self._results, leaf))
            return result
        if not (outcome.makes_tensors or outcome.changed):
            if func in GRADIENT_HOOKS:
                return outcome.result
            if outcome.returns_argument:
                return self._filled(outcome.result) if counts else outcome.result
            with plain_torch_functions():
                return func(*args, **kwargs)
        if counts:
            return self._filled(outcome.result)
        if outcome.changed:
            return outcome.result
        result = func(*args, **kwargs)
        union = frozenset(source for made in sources for source in made.sources)
        for tensor in tensors_in(result):
            if self._of(tensor) is None:
                self._track(tensor, None, union)
        return result

    def _take_changes(self, outcome: Outcome, first: Tensor | None) -> bool:
        """Take in that a function changes arguments in place, which an earlier stage has done.

        Args:
            outcome: what the function does.
            first: what it changes and does not return.

        Returns:
            Whether the arguments are now as the earlier stage has left them.
        """
        leaves = values_in(outcome.result if first is None else first)
        for tensor in outcome.changed:
            made = self._of(tensor)
            if made is not None and made.is_final:
                continue
            leaf = next((leaf for leaf, value in enumerate(leaves) if value is tensor), None)
            place = Place(self._layer, self._results, -1 if leaf is None else leaf)
            if made is not None or self._counts_none or place not in self._received:
                return False
            # No placeholder can take its place, so it is always sent.
            tensor.copy_(self._received[place])
            self._track(tensor, place, frozenset([place]), is_final=True)
            if place in self._sent:
                self._held[place] = tensor
            self._read([self._made[id(tensor)]])
        return True

    def _of(self, tensor: Tensor) -> _Made | None:
        made = self._made.get(id(tensor))
        return made if made is not None and made.tensor() is tensor else None

    def _sources(self, tensors: Iterable[Any]) -> list[_Made]:
        return [made for tensor in tensors if (made := self._of(tensor)) is not None]

    def _read(self, sources: Iterable[_Made]) -> None:
        if self._reads is not None:
            for made in sources:
                self._reads.read |= made.sources

    def _track(
        self,
        tensor: Tensor,
        place: Place | None,
        sources: frozenset[Value] = frozenset(),
        is_final: bool = False,
    ) -> None:
        self._made[id(tensor)] = _Made(weakref.ref(tensor), place, sources, is_final)

    def _note(self, result: Any) -> None:
        """Note the leaves of a result that this stage has computed."""
        for leaf, value in enumerate(object_leaves(result, Tensor)):
            place = Place(self._layer, self._results, leaf)
            if place in self._sent:
                self._held[place] = value
            if self.follows and self._of(value) is None:
                self._track(value, place)

    def _filled(self, result: Any) -> Any:
        """Put what was received into a result that this stage does not compute, and note it.

        Args:
            result: a tree of descriptions, and of tensors that are as they should be.
        """

        def put(leaf: int, value: Any) -> Tensor:
            place = Place(self._layer, self._results, leaf)
            known = self._received.get(place, value)
            # An argument that the function returns, though it may make another of one with values.
            if (
                self._results
                and isinstance(value, Tensor)
                and not (isinstance(value, Placeholder) and known is not value)
            ):
                return value
            if isinstance(known, Unsent):
                source = f"the output of layer {self._names[self._layer]!r}"
                source = computed_from(source) if self._results else source
                tensor: Tensor = Placeholder.of(known, self._progress, source)
            else:
                tensor = alias_of(known)
                if place in self._sent:
                    self._held[place] = tensor
            if self.follows:
                self._track(tensor, place, frozenset([place]), is_final=True)
            return tensor

        return filled(result, put)

    def _refuse(self, buffer: Tensor) -> None:
        raise MisconfigurationException(
            f"{self._buffers[id(buffer)]!r} changes between layers "
            f"{self._names[self._layer]!r} and {self._names[self._layer + 1]!r}, which only one "
            "stage sees. Make its module a layer, too: AxoSparseStrategy(pipeline=[...]) takes "
            "several containers and modules in the order in which they are called."
            + see("values-between-layers")
        )


def _makes_scalar(outcome: Outcome) -> bool:
    """Whether a function returns a single number, such as a loss of what is between layers.

    It is computed where it is read. So what it is made of crosses, which has rows of samples, and
    the end of the step computes it from those of the whole batch.
    """
    return any(isinstance(each, Unsent) and not each.shape for each in values_in(outcome.result))


def _changed_first(func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
    """The argument that a function changes and does not return, if it is one that does so."""
    return args[0] if func is Tensor.__setitem__ else None
