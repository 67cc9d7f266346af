"""Joins what layers gave for the micro-batches of a batch to what they give for the whole batch.

Samples lie along one dimension of a tensor. There may be several rows a sample, such as its tokens
or two views of it; rows of one view may follow those of another, as in ``torch.cat([a, b])``. How
samples lie is seen where the layers compute a whole batch and its micro-batches (``learn``);
elsewhere it follows from the shapes. What has no samples, such as a mask of positions, is alike in
all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.pipeline.crossing.message import Activation
from lightning_axosparse.pipeline.crossing.placeholder import Unsent, values_in
from lightning_axosparse.support.object_trees import object_map
from lightning_axosparse.support.troubleshooting import see


class Axis(NamedTuple):
    """How the samples lie in a tensor.

    Attributes:
        dim: the dimension.
        rows: a sample.
        views: how often all samples follow one another in it; a divisor of ``rows``.
    """

    dim: int
    rows: int = 1
    views: int = 1

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the rows of consecutive samples."""
        apart = [part.unflatten(self.dim, (self.views, -1)) for part in parts]
        return torch.cat(apart, self.dim + 1).flatten(self.dim, self.dim + 1)

    def part(self, tensor: Tensor, first: int, size: int) -> Tensor:
        """The rows of some consecutive samples."""
        part: Tensor = self._apart(tensor, first, size).flatten(self.dim, self.dim + 1)
        return part

    def add_part(self, total: Tensor, part: Tensor, first: int, size: int) -> None:
        """Add to the rows of some consecutive samples."""
        self._apart(total, first, size).add_(part.unflatten(self.dim, (self.views, -1)))

    def _apart(self, tensor: Tensor, first: int, size: int) -> Tensor:
        rows = self.rows // self.views
        apart = tensor.unflatten(self.dim, (self.views, -1))
        return apart.narrow(self.dim + 1, first * rows, size * rows)  # type: ignore[no-any-return]

    def split(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Part the rows of some numbers of samples again."""
        begins = accumulate(sizes, initial=0)
        return [self.part(tensor, first, size) for first, size in zip(begins, sizes, strict=False)]


Layout = Axis | Literal["alike", "mean", "sum"]
"""How a tensor for the whole batch follows from those for micro-batches: one after the other, or,
where it has no samples, the same, their mean weighted by samples, or their sum.
"""


@dataclass
class Layouts:
    """How the tensors lie that cross the edges of stages, by where the step makes them."""

    known: dict[Hashable, Layout] = field(default_factory=dict)

    def of(self, key: Hashable, parts: Sequence[Any], sizes: Sequence[int]) -> Layout | None:
        """How tensors of micro-batches join; None if that cannot be known.

        Args:
            key: where the step makes them.
            parts: the tensors, or descriptions of them.
            sizes: samples of each micro-batch.
        """
        known = self.known.get(key)
        if isinstance(known, Axis):
            fits = all(
                known.dim < len(part.shape) and part.shape[known.dim] == known.rows * size
                for part, size in zip(parts, sizes, strict=True)
            )
            return known if fits else _by_shape(parts, sizes)
        return _by_shape(parts, sizes) if known is None else known


def _by_shape(parts: Sequence[Any], sizes: Sequence[int]) -> Layout | None:
    """How tensors join, by their shapes: along the first dimension that grows with the samples."""
    first = parts[0].shape
    if len({len(part.shape) for part in parts}) > 1:
        return None
    for dim in range(len(first)):
        rows, rest = divmod(first[dim], sizes[0])
        others = [part.shape[:dim] + part.shape[dim + 1 :] for part in parts]
        grows = all(part.shape[dim] == rows * n for part, n in zip(parts, sizes, strict=True))
        if not rest and rows and grows and all(other == others[0] for other in others):
            return Axis(dim, rows)
    return "alike" if len({part.shape for part in parts}) == 1 else None


def found_layout(
    whole: Tensor,
    parts: Sequence[Tensor],
    sizes: Sequence[int],
    differ: Differ,
    may_reduce: bool = False,
) -> tuple[Layout | None, float]:
    """How tensors of micro-batches make up that of the whole batch, and how much is missing.

    Args:
        whole: that of the whole batch.
        parts: those of its micro-batches.
        sizes: samples of each.
        differ: measures how much two tensors of one shape differ, relative to their size.
        may_reduce: whether they may be means or sums over samples.
    """
    tried: list[tuple[float, int, Layout | None]] = []
    candidates: list[Layout]
    if all(part.shape == whole.shape for part in parts):
        candidates = ["alike"]
        if may_reduce and whole.is_floating_point():
            candidates += ["mean", "sum"]
    else:
        found = [
            axes(whole.shape, p.shape, sum(sizes), n) for p, n in zip(parts, sizes, strict=True)
        ]
        candidates = [axis for axis in found[0] if all(axis in other for other in found)]
    for place, layout in enumerate(candidates):
        joined = joined_by(layout, parts, sizes)
        worst = max(differ(part, whole) for part in parts) if layout == "alike" else 0.0
        tried.append((max(differ(joined, whole), worst), place, layout))
    difference, _, best = min(tried, default=(float("inf"), 0, None))
    return best, difference


Differ = Callable[[Tensor, Tensor], float]


def axes(whole: torch.Size, part: torch.Size, samples: int, size: int) -> list[Axis]:
    """How samples may lie in a tensor, by the shapes for all of them and for some.

    Args:
        whole: the shape for the whole batch.
        part: the shape for a micro-batch.
        samples: of the batch.
        size: samples of the micro-batch, which are not all.
    """
    unlike = [dim for dim, length in enumerate(whole) if part[dim : dim + 1] != (length,)]
    if len(whole) != len(part) or len(unlike) != 1:
        return []
    rows, rest = divmod(whole[unlike[0]], samples)
    if rest or part[unlike[0]] != rows * size:
        return []
    return [Axis(unlike[0], rows, views) for views in range(1, rows + 1) if rows % views == 0]


def joined_by(layout: Layout, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The tensor of the whole batch."""
    if isinstance(layout, Axis):
        return layout.cat(parts)
    if layout == "alike":
        return parts[0]
    shares = _shares(layout, sizes)
    return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)


def _shares(layout: Layout, sizes: Sequence[int]) -> list[float]:
    """The weight of each micro-batch's tensor in that of the batch, where it has no samples."""
    if layout == "alike":  # They are one value, which each micro-batch has computed.
        return [float(n == 0) for n in range(len(sizes))]
    return [1.0 if layout == "sum" else size / sum(sizes) for size in sizes]


def gradients_of(
    layout: Layout, gradient: Tensor | None, sizes: Sequence[int]
) -> Sequence[Tensor | None]:
    """The gradients of micro-batches' tensors by that of the batch's."""
    if gradient is None:
        return [None] * len(sizes)
    if isinstance(layout, Axis):
        return [part.contiguous() for part in layout.split(gradient, sizes)]
    shares = _shares(layout, sizes)
    return [gradient * share if share else None for share in shares]


class Joined(NamedTuple):
    """What layers give for a batch.

    Attributes:
        activation: what would have arrived for the batch as a whole.
        tensors: its tensors, leaves of a new graph.
        layouts: how each of them follows from those of micro-batches.
    """

    activation: Activation
    tensors: Sequence[Tensor]
    layouts: Sequence[Layout]

    def split(
        self, gradients: Sequence[Tensor | None], sizes: Sequence[int]
    ) -> list[Sequence[Tensor | None]]:
        """For each tensor, the gradients of those of micro-batches by its own."""
        return [
            gradients_of(layout, gradient, sizes)
            for layout, gradient in zip(self.layouts, gradients, strict=True)
        ]

    def gradients(self, sizes: Sequence[int]) -> list[list[Tensor | None]]:
        """For each micro-batch, the gradients of the tensors in its activation."""
        parted = self.split([tensor.grad for tensor in self.tensors], sizes)
        return [[parts[number] for parts in parted] for number in range(len(sizes))]


def join(
    activations: Sequence[Activation],
    sizes: Sequence[int],
    layouts: Layouts,
    name_of: Callable[[int], str],
) -> Joined:
    """Join the activations of the micro-batches of a batch.

    Args:
        activations: those of all micro-batches, in order.
        sizes: samples of each.
        layouts: how their tensors lie.
        name_of: returns the name of a layer by its index.

    Raises:
        MisconfigurationException: naming the layer whose values cannot be joined.
    """
    keyed = [keyed_values(activation) for activation in activations]
    keys = [key for key, _ in keyed[0]]
    for number, other in enumerate(keyed):
        others = [key for key, _ in other]
        if others != keys:
            unlike = next(one or two for one, two in zip_longest(others, keys) if one != two)
            raise cannot_join(name_of(layer_of(unlike)), f"other values for micro-batch {number}")
    tensors, found = list[Tensor](), list[Layout]()
    made: list[Any] = []
    for key, parts in zip(
        keys, zip(*([v for _, v in own] for own in keyed), strict=True), strict=True
    ):
        layout = layouts.of(key, parts, sizes)
        if layout is None:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            what = f"tensors of shapes {shapes} for micro-batches of {', '.join(map(str, sizes))}"
            raise cannot_join(name_of(layer_of(key)), what + " samples")
        if isinstance(parts[0], Unsent):
            made.append(_described(parts, layout))
            continue
        joined = joined_by(layout, [part.detach() for part in parts], sizes).detach()
        requires_grad = any(part.requires_grad for part in parts)
        tensors.append(joined.requires_grad_(requires_grad))
        found.append(layout)
        made.append(tensors[-1])
    return Joined(_with_values(activations[0], iter(made)), tensors, found)


def _with_values(activation: Activation, values: Iterator[Any]) -> Activation:
    """An activation with other tensors and descriptions, in their order."""

    def replaced(tree: Any) -> Any:
        return object_map((Tensor, Unsent), lambda value: next(values), tree)

    return activation._replace(
        output=replaced(activation.output),
        values=tuple((place, next(values)) for place, _ in activation.values),
        forms=tuple((layer, replaced(form)) for layer, form in activation.forms),
        side_outputs=tuple(
            side._replace(value=replaced(side.value)) for side in activation.side_outputs
        ),
    )


def _described(parts: Sequence[Unsent], layout: Layout) -> Unsent:
    """What a tensor of the whole batch looks like."""
    first = parts[0]
    if not isinstance(layout, Axis):
        return first
    shape = list(first.shape)
    shape[layout.dim] = sum(part.shape[layout.dim] for part in parts)
    return Unsent(torch.Size(shape), first.dtype, first.device, first.requires_grad)


def learn(
    whole: Activation, parts: Sequence[Activation], sizes: Sequence[int], differ: Differ
) -> tuple[Mapping[Hashable, Layout], list[tuple[Hashable, float]]]:
    """See how the activations of micro-batches make up that of the whole batch.

    Returns:
        The layouts, and where and by how much what is joined differs from the whole.
    """
    keyed = [keyed_values(activation) for activation in parts]
    numbers = [_numbers(activation.output) for activation in (whole, *parts)]
    known: dict[Hashable, Layout] = {}
    differences: list[tuple[Hashable, float]] = []
    if any(each != numbers[0] for each in numbers):
        differences.append((("output", -1), float("inf")))
    for number, (key, value) in enumerate(keyed_values(whole)):
        own = [each[number] for each in keyed if number < len(each)]
        if len(own) < len(parts) or any(other != key for other, _ in own):
            differences.append((key, float("inf")))
            break
        values = [part for _, part in own]
        if isinstance(value, Unsent):
            shapes = [torch.empty(each.shape, device="meta") for each in (value, *values)]
            layout, difference = found_layout(shapes[0], shapes[1:], sizes, lambda a, b: 0.0)
        else:
            detached = [part.detach() for part in values]
            may_reduce = not (isinstance(key, tuple) and key[0] == "output")
            layout, difference = found_layout(value.detach(), detached, sizes, differ, may_reduce)
        if layout is not None:
            known[key] = layout
        differences.append((key, difference))
    return known, differences


def _numbers(tree: Any) -> list[Any]:
    """The plain values in nested containers, which must not depend on the number of samples."""
    if isinstance(tree, (list, tuple)):
        return [number for child in tree for number in _numbers(child)]
    if isinstance(tree, dict):
        return [number for child in tree.values() for number in _numbers(child)]
    return [tree] if isinstance(tree, (bool, int, float, str)) else []


def sent_tensors(activation: Activation) -> list[Tensor]:
    """The tensors in an activation, in the order in which they are joined."""
    return [value for _, value in keyed_values(activation) if isinstance(value, Tensor)]


def keyed_values(activation: Activation) -> list[tuple[Hashable, Any]]:
    """The tensors and descriptions in an activation, in order, with where the step makes them."""
    found: list[tuple[Hashable, Any]] = [
        (("output", leaf), value) for leaf, value in enumerate(values_in(activation.output))
    ]
    found += activation.values
    for layer, form in activation.forms:
        found += [(("form", layer, leaf), value) for leaf, value in enumerate(values_in(form))]
    for number, side in enumerate(activation.side_outputs):
        for leaf, value in enumerate(values_in(side.value)):
            found.append(((side.place._replace(leaf=leaf), number), value))
    return found


def layer_of(key: Any) -> int:
    """The layer behind which the step makes a value; -1 for the last one."""
    if key[0] == "output":
        return -1
    if key[0] == "form":
        return int(key[1])
    place = key if hasattr(key, "layer") else key[0]
    return int(place.layer)


def cannot_join(layer: str, what: str) -> MisconfigurationException:
    """The error of a layer whose outputs for micro-batches do not make up those for the batch."""
    return MisconfigurationException(
        f"Layer {layer!r} gives {what}, and it is not known how these make up what it gives for the"
        " whole batch, on which the end of the step runs. Let it return tensors with a dimension of"
        " samples, or what does not depend on the samples; give split_batch= a function whose "
        "micro-batches it treats alike; or use microbatches=1." + see("steps")
    )
