"""Joins the layer outputs of micro-batches to those of the whole batch.

The samples of a tensor are along one dimension, in one row each or in several, such as the tokens
of a sample or two views of it. For a batch of samples s and t, the rows are:

    Axis(dim=0)                     s, t
    Axis(dim=0, rows=2)             s1, s2, t1, t2    as of ``x.flatten(0, 1)``
    Axis(dim=0, rows=2, views=2)    s1, t1, s2, t2    as of ``torch.cat([view1, view2])``

The layout is learned from a batch that the layers compute whole and in micro-batches (``learn``);
otherwise it follows from the shapes. A tensor without samples, such as a mask of positions, is
alike in all micro-batches.
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
from lightning_axosparse.pipeline.crossing.placeholder import TensorDescription, values_in
from lightning_axosparse.support.object_trees import object_map
from lightning_axosparse.support.troubleshooting import see


class Axis(NamedTuple):
    """The layout of the samples in a tensor.

    Attributes:
        dim: the dimension of the samples.
        rows: number of rows of each sample.
        views: number of times that the dimension runs through all samples; a divisor of ``rows``.
    """

    dim: int
    rows: int = 1
    views: int = 1

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the rows of consecutive samples."""
        by_view = [part.unflatten(self.dim, (self.views, -1)) for part in parts]
        return torch.cat(by_view, self.dim + 1).flatten(self.dim, self.dim + 1)

    def part(self, tensor: Tensor, first: int, size: int) -> Tensor:
        """Return the rows of ``size`` samples from ``first`` on."""
        part: Tensor = self._by_view(tensor, first, size).flatten(self.dim, self.dim + 1)
        return part

    def add_part(self, total: Tensor, part: Tensor, first: int, size: int) -> None:
        """Add to the rows of ``size`` samples from ``first`` on."""
        self._by_view(total, first, size).add_(part.unflatten(self.dim, (self.views, -1)))

    def _by_view(self, tensor: Tensor, first: int, size: int) -> Tensor:
        """Return the rows of these samples, with the views as a dimension of their own."""
        rows = self.rows // self.views
        views = tensor.unflatten(self.dim, (self.views, -1))
        return views.narrow(self.dim + 1, first * rows, size * rows)  # type: ignore[no-any-return]

    def split(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Split the rows into those of micro-batches of these sizes."""
        begins = accumulate(sizes, initial=0)
        return [self.part(tensor, first, size) for first, size in zip(begins, sizes, strict=False)]


SampleLayout = Axis | Literal["alike", "mean", "sum"]
"""How the tensor of the whole batch follows from those of micro-batches: by joining the rows, or,
if it has no samples, as the same tensor, their mean weighted by samples, or their sum.
"""


@dataclass
class SampleLayouts:
    """The layouts of the tensors that a stage sends, by the place where the step computes them."""

    known: dict[Hashable, SampleLayout] = field(default_factory=dict)

    def of(self, key: Hashable, parts: Sequence[Any], sizes: Sequence[int]) -> SampleLayout | None:
        """Return the layout of a tensor; None if it is unknown.

        Args:
            key: the place where the step computes it.
            parts: the tensors of the micro-batches, or descriptions of them.
            sizes: number of samples in each micro-batch.
        """
        known = self.known.get(key)
        if isinstance(known, Axis):
            fits = all(
                known.dim < len(part.shape) and part.shape[known.dim] == known.rows * size
                for part, size in zip(parts, sizes, strict=True)
            )
            return known if fits else _by_shape(parts, sizes)
        return _by_shape(parts, sizes) if known is None else known


def _by_shape(parts: Sequence[Any], sizes: Sequence[int]) -> SampleLayout | None:
    """Return the layout by the shapes: samples are along the first dimension that grows with them.

    Shapes (2, 5, 8) and (3, 5, 8) of 2 and 3 samples give ``Axis(0)``.
    """
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


def best_layout(
    whole: Tensor,
    parts: Sequence[Tensor],
    sizes: Sequence[int],
    differ: Differ,
    may_reduce: bool = False,
) -> tuple[SampleLayout | None, float]:
    """Return the layout with which micro-batches' tensors are closest to that of the whole batch.

    Args:
        whole: the tensor of the whole batch.
        parts: those of its micro-batches.
        sizes: number of samples in each micro-batch.
        differ: returns the relative difference of two tensors of one shape.
        may_reduce: whether the tensors may be means or sums over samples.

    Returns:
        The layout, and the relative difference that remains; None and infinity if none fits.
    """
    tried: list[tuple[float, int, SampleLayout | None]] = []
    candidates: list[SampleLayout]
    if all(part.shape == whole.shape for part in parts):
        candidates = ["alike"]
        if may_reduce and whole.is_floating_point():
            candidates += ["mean", "sum"]
    else:
        possible = [
            axes(whole.shape, p.shape, sum(sizes), n) for p, n in zip(parts, sizes, strict=True)
        ]
        candidates = [axis for axis in possible[0] if all(axis in other for other in possible)]
    for place, layout in enumerate(candidates):
        joined = joined_by(layout, parts, sizes)
        worst = max(differ(part, whole) for part in parts) if layout == "alike" else 0.0
        tried.append((max(differ(joined, whole), worst), place, layout))
    difference, _, best = min(tried, default=(float("inf"), 0, None))
    return best, difference


Differ = Callable[[Tensor, Tensor], float]


def axes(whole: torch.Size, part: torch.Size, samples: int, size: int) -> list[Axis]:
    """Return the layouts that the shapes of a tensor in a batch and in a micro-batch allow.

    Shapes (8, 3) and (4, 3) of 4 and 2 samples allow ``Axis(0, 2, 1)`` and ``Axis(0, 2, 2)``.

    Args:
        whole: the shape for the whole batch.
        part: the shape for a micro-batch.
        samples: number of samples in the batch.
        size: number of samples in the micro-batch, less than in the batch.
    """
    unequal = [dim for dim, length in enumerate(whole) if part[dim : dim + 1] != (length,)]
    if len(whole) != len(part) or len(unequal) != 1:
        return []
    rows, rest = divmod(whole[unequal[0]], samples)
    if rest or part[unequal[0]] != rows * size:
        return []
    return [Axis(unequal[0], rows, views) for views in range(1, rows + 1) if rows % views == 0]


def joined_by(layout: SampleLayout, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Join the tensors of micro-batches to that of the whole batch."""
    if isinstance(layout, Axis):
        return layout.cat(parts)
    if layout == "alike":
        return parts[0]
    shares = _shares(layout, sizes)
    return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)


def _shares(layout: SampleLayout, sizes: Sequence[int]) -> list[float]:
    """Return the weight of each micro-batch's tensor in that of the batch, if it has no samples."""
    if layout == "alike":  # Only the first one is used.
        return [float(n == 0) for n in range(len(sizes))]
    return [1.0 if layout == "sum" else size / sum(sizes) for size in sizes]


def gradients_of(
    layout: SampleLayout, gradient: Tensor | None, sizes: Sequence[int]
) -> Sequence[Tensor | None]:
    """Return the gradients of micro-batches' tensors, given that of the batch's tensor."""
    if gradient is None:
        return [None] * len(sizes)
    if isinstance(layout, Axis):
        return [part.contiguous() for part in layout.split(gradient, sizes)]
    shares = _shares(layout, sizes)
    return [gradient * share if share else None for share in shares]


class Joined(NamedTuple):
    """The layer outputs of a whole batch.

    Attributes:
        activation: the activation of the whole batch, as a stage would receive it.
        tensors: the tensors in it, leaves of a new graph.
        layouts: the layout of each tensor.
    """

    activation: Activation
    tensors: Sequence[Tensor]
    layouts: Sequence[SampleLayout]

    def split(
        self, gradients: Sequence[Tensor | None], sizes: Sequence[int]
    ) -> list[Sequence[Tensor | None]]:
        """Split the gradient of each tensor into those of the micro-batches' tensors."""
        return [
            gradients_of(layout, gradient, sizes)
            for layout, gradient in zip(self.layouts, gradients, strict=True)
        ]

    def gradients(self, sizes: Sequence[int]) -> list[list[Tensor | None]]:
        """Return, for each micro-batch, the gradients of the tensors in its activation."""
        by_tensor = self.split([tensor.grad for tensor in self.tensors], sizes)
        return [[parts[number] for parts in by_tensor] for number in range(len(sizes))]


def join(
    activations: Sequence[Activation],
    sizes: Sequence[int],
    layouts: SampleLayouts,
    name_of: Callable[[int], str],
) -> Joined:
    """Join the activations of the micro-batches of a batch.

    Args:
        activations: the activations of all micro-batches, in order.
        sizes: number of samples in each micro-batch.
        layouts: the known layouts of their tensors.
        name_of: returns the name of a layer by its index.

    Raises:
        MisconfigurationException: if the outputs of a layer cannot be joined; it names the layer.
    """
    keyed = [keyed_values(activation) for activation in activations]
    keys = [key for key, _ in keyed[0]]
    for number, other in enumerate(keyed):
        others = [key for key, _ in other]
        if others != keys:
            unequal = next(one or two for one, two in zip_longest(others, keys) if one != two)
            raise cannot_join(name_of(layer_of(unequal)), f"other values for micro-batch {number}")
    tensors, used = list[Tensor](), list[SampleLayout]()
    values: list[Any] = []
    for key, parts in zip(
        keys, zip(*([v for _, v in own] for own in keyed), strict=True), strict=True
    ):
        layout = layouts.of(key, parts, sizes)
        if layout is None:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            text = f"tensors of shapes {shapes} for micro-batches of {', '.join(map(str, sizes))}"
            raise cannot_join(name_of(layer_of(key)), text + " samples")
        if isinstance(parts[0], TensorDescription):
            values.append(_joined_description(parts, layout))
            continue
        joined = joined_by(layout, [part.detach() for part in parts], sizes).detach()
        requires_grad = any(part.requires_grad for part in parts)
        tensors.append(joined.requires_grad_(requires_grad))
        used.append(layout)
        values.append(tensors[-1])
    return Joined(_with_values(activations[0], iter(values)), tensors, used)


def _with_values(activation: Activation, values: Iterator[Any]) -> Activation:
    """Replace the tensors and descriptions in an activation, in their order."""

    def replaced(tree: Any) -> Any:
        return object_map((Tensor, TensorDescription), lambda value: next(values), tree)

    return activation._replace(
        output=replaced(activation.output),
        values=tuple((place, next(values)) for place, _ in activation.values),
        forms=tuple((layer, replaced(form)) for layer, form in activation.forms),
        side_outputs=tuple(
            side._replace(value=replaced(side.value)) for side in activation.side_outputs
        ),
    )


def _joined_description(
    parts: Sequence[TensorDescription], layout: SampleLayout
) -> TensorDescription:
    """Return the description of a tensor of the whole batch."""
    first = parts[0]
    if not isinstance(layout, Axis):
        return first
    shape = list(first.shape)
    shape[layout.dim] = sum(part.shape[layout.dim] for part in parts)
    return TensorDescription(torch.Size(shape), first.dtype, first.device, first.requires_grad)


def learn(
    whole: Activation, parts: Sequence[Activation], sizes: Sequence[int], differ: Differ
) -> tuple[Mapping[Hashable, SampleLayout], list[tuple[Hashable, float]]]:
    """Learn the layouts with which the activations of micro-batches join to that of the batch.

    Returns:
        The layout, and the relative difference after joining, of the tensor of each place.
    """
    keyed = [keyed_values(activation) for activation in parts]
    numbers = [_numbers(activation.output) for activation in (whole, *parts)]
    known: dict[Hashable, SampleLayout] = {}
    differences: list[tuple[Hashable, float]] = []
    if any(each != numbers[0] for each in numbers):
        differences.append((("output", -1), float("inf")))
    for number, (key, value) in enumerate(keyed_values(whole)):
        own = [each[number] for each in keyed if number < len(each)]
        if len(own) < len(parts) or any(other != key for other, _ in own):
            differences.append((key, float("inf")))
            break
        values = [part for _, part in own]
        if isinstance(value, TensorDescription):
            shapes = [torch.empty(each.shape, device="meta") for each in (value, *values)]
            layout, difference = best_layout(shapes[0], shapes[1:], sizes, lambda a, b: 0.0)
        else:
            detached = [part.detach() for part in values]
            may_reduce = not (isinstance(key, tuple) and key[0] == "output")
            layout, difference = best_layout(value.detach(), detached, sizes, differ, may_reduce)
        if layout is not None:
            known[key] = layout
        differences.append((key, difference))
    return known, differences


def _numbers(tree: Any) -> list[Any]:
    """Return the plain values in nested containers, which must not depend on the samples."""
    if isinstance(tree, (list, tuple)):
        return [number for child in tree for number in _numbers(child)]
    if isinstance(tree, dict):
        return [number for child in tree.values() for number in _numbers(child)]
    return [tree] if isinstance(tree, (bool, int, float, str)) else []


def sent_tensors(activation: Activation) -> list[Tensor]:
    """Return the tensors in an activation, in the order in which they are joined."""
    return [value for _, value in keyed_values(activation) if isinstance(value, Tensor)]


def keyed_values(activation: Activation) -> list[tuple[Hashable, Any]]:
    """Return the tensors and descriptions in an activation, with the places that compute them."""
    keyed: list[tuple[Hashable, Any]] = [
        (("output", leaf), value) for leaf, value in enumerate(values_in(activation.output))
    ]
    keyed += activation.values
    for layer, form in activation.forms:
        keyed += [(("form", layer, leaf), value) for leaf, value in enumerate(values_in(form))]
    for number, side in enumerate(activation.side_outputs):
        for leaf, value in enumerate(values_in(side.value)):
            keyed.append(((side.place._replace(leaf=leaf), number), value))
    return keyed


def layer_of(key: Any) -> int:
    """Return the layer behind which the step computes a value; -1 for the last one."""
    if key[0] == "output":
        return -1
    if key[0] == "form":
        return int(key[1])
    place = key if hasattr(key, "layer") else key[0]
    return int(place.layer)


def cannot_join(layer: str, outputs: str) -> MisconfigurationException:
    """Return the error of a layer whose outputs for micro-batches cannot be joined."""
    return MisconfigurationException(
        f"Layer {layer!r} gives {outputs}, and it is not known how these make up what it gives for "
        "the whole batch, on which the end of the step runs. Let it return tensors with a "
        "dimension of samples, or what does not depend on the samples; give split_batch= a "
        "function whose micro-batches it treats alike; or use microbatches=1." + see("steps")
    )
