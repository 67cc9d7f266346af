"""Sends what later stages need of the values that a step computes between its layers.

A step may do more with a layer's output than give it to the next layer: add it to a later one, pool
it, keep it for a decoder. Every stage runs this code, and numbers the results that derive from
outputs of layers; as it is the same code, so are the numbers.

    stage that computed the layer   makes the results, and goes on until the step calls a layer of
                                    the next stage; then it sends the values that anything of
                                    Python still refers to, as the step can use no other ones
    later stage                     puts what it has received where its own run of the code makes
                                    the result of that number; all other results are placeholders,
                                    of which nothing is computed

So a residual stream, a skip connection and the states of an encoder cross the edges of stages, with
their gradients, and a network that gives each layer's output to the next layer alone sends nothing
else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.pipeline.pausable_mode import PausableMode
from lightning_axosparse.pipeline.placeholder import Unsent, described
from lightning_axosparse.support.torch_internals import (
    references,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from lightning_axosparse.support.troubleshooting import see


class Place(NamedTuple):
    """Where a step makes a value.

    Attributes:
        layer: the layer that was called last.
        result: number of the result since then; 0 is the layer's output.
        leaf: index among the leaves of the result.
    """

    layer: int
    result: int
    leaf: int


class _Made(NamedTuple):
    """A value that derives from outputs of layers.

    Attributes:
        tensor: the value.
        place: where the step made it last.
        is_placeholder: whether this stage has not its value.
    """

    tensor: weakref.ref[Tensor]
    place: Place
    is_placeholder: bool = False


class _Alias(torch.autograd.Function):
    """A received tensor as the step gets it: it is no leaf, so that it may change in place."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class DerivedValues(PausableMode):
    """The values of one micro-batch on one stage; to be entered round its step.

    Args:
        received: those that the previous stage sent.
        buffers: names of the module's buffers, by ``id``.
        names: of the layers, for messages.
    """

    def __init__(
        self,
        received: Iterable[tuple[Place, Tensor]],
        buffers: Mapping[int, str],
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self._received, self._buffers, self._names = dict(received), buffers, names
        self._made: dict[int, _Made] = {}
        self._layer, self._results = -1, 0
        self._output: Any = None
        self._is_before_stage = True
        self.placeholders: dict[int, list[Tensor]] = {}
        """Per earlier layer, placeholders made since its call, which must not get a gradient."""

    def begin_stage(self, sends: bool) -> None:
        """Take in that from now on values are made, not received.

        Args:
            sends: whether some of them may have to be sent; else nothing more is followed.
        """
        self._is_before_stage = False
        if not sends:
            self._made.clear()

    def end_layer(self, index: int, output: Any) -> None:
        """Note the output of a layer that this stage has computed."""
        self._layer, self._results, self._output = index, 0, described(output)
        self._note(output)

    def replace_output(self, index: int, output: Any, placeholders: Sequence[Tensor]) -> Any:
        """Return the output of a layer of an earlier stage, with what was received of it.

        Args:
            index: of the layer.
            output: as far as it is known.
            placeholders: its tensors that are not known.
        """
        self._layer, self._results = index, 0
        unknown = {id(tensor) for tensor in placeholders}
        return self._filled(output, unknown.__contains__)

    def needed(self) -> tuple[Any, list[tuple[Place, Tensor]]]:
        """What the step still needs when it calls the next stage's first layer.

        Returns:
            The output of the layer that was called last, with descriptions of tensors that nothing
            refers to; and the other values that something of Python still refers to.
        """
        values = dict(self._referred())
        places = (Place(self._layer, 0, leaf) for leaf in count())
        output = tree_map(lambda leaf: values.pop(next(places), leaf), self._output)
        return output, list(values.items())

    def _referred(self) -> Iterator[tuple[Place, Tensor]]:
        for made in self._made.values():
            # A name for the tensor would be a reference.
            if made.tensor() is None or made.is_placeholder:
                continue
            if references(made.tensor()):  # type: ignore[arg-type]
                yield made.place, made.tensor()  # type: ignore[misc]

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
        sources = [made for tensor in _tensors((args, kwargs)) if (made := self._of(tensor))]
        if not sources:
            return func(*args, **kwargs)
        self._results += 1
        if self._is_before_stage and any(made.is_placeholder for made in sources):
            return self._filled(self._imagined(func, args, kwargs), lambda _: True)
        # Running statistics change without a new version.
        buffers = [(b, b.clone()) for b in _tensors((args, kwargs)) if id(b) in self._buffers]
        result = func(*args, **kwargs)
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                self._refuse(buffer)
        self._note(result)
        return result

    def _of(self, tensor: Tensor) -> _Made | None:
        made = self._made.get(id(tensor))
        return made if made is not None and made.tensor() is tensor else None

    def _note(self, result: Any) -> None:
        """Note the leaves of a result that this stage has computed."""
        for leaf, value in enumerate(
            [result] if isinstance(result, Tensor) else tree_leaves(result)
        ):
            if isinstance(value, Tensor):
                place = Place(self._layer, self._results, leaf)
                self._made[id(value)] = _Made(weakref.ref(value), place)

    def _filled(self, result: Any, is_placeholder: Callable[[int], bool]) -> Any:
        """Put what was received into a result that this stage does not compute, and note it.

        Args:
            result: a tree.
            is_placeholder: says so of its tensors, by ``id``.
        """
        leaves = count()

        def received(value: Any) -> Any:
            place = Place(self._layer, self._results, next(leaves))
            if not isinstance(value, Tensor):
                return value
            is_unknown = place not in self._received and is_placeholder(id(value))
            if not is_unknown:
                value = _Alias.apply(self._received.get(place, value))  # type: ignore[no-untyped-call]
            elif value.requires_grad:
                self.placeholders.setdefault(self._layer, []).append(value)
            self._made[id(value)] = _Made(weakref.ref(value), place, is_unknown)
            return value

        return received(result) if isinstance(result, Tensor) else tree_map(received, result)

    def _imagined(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a function of placeholders returns: placeholders, without computing anything."""
        if func.__name__ == "__get__":  # of a property, such as the shape or the transpose
            return func(*args, **kwargs)
        sources = list(_tensors((args, kwargs)))
        tracks = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)
        device = next(tensor.device.type for tensor in sources if self._of(tensor))
        try:
            with torch.no_grad():
                result = func(*_on_meta(args), **_on_meta(kwargs))
        except Exception:  # It reads values, or moves them, or does not know the meta device.
            return func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return func(*args, **kwargs)

        def placeholder(tensor: Tensor) -> Tensor:
            has_gradient = tracks and (tensor.is_floating_point() or tensor.is_complex())
            return Unsent(tensor.shape, tensor.dtype, device, has_gradient).placeholder()

        return tree_map_only(Tensor, placeholder, result)

    def _refuse(self, buffer: Tensor) -> None:
        raise MisconfigurationException(
            f"{self._buffers[id(buffer)]!r} changes between layers "
            f"{self._names[self._layer]!r} and {self._names[self._layer + 1]!r}, which only one "
            "stage sees. Make its module a layer, too: AxoSparseStrategy(pipeline=[...]) takes "
            "several containers and modules in the order in which they are called."
            + see("values-between-layers")
        )


def _on_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    for value in tree.values() if isinstance(tree, Mapping) else tree:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors(value)
