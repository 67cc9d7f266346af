"""Joins the layer outputs of micro-batches to those of the whole batch.

The samples of a tensor are along one dimension, in one row each or in several, such as the tokens
of a sample or two views of it. For a batch of samples s and t, the rows are:

    Axis(dim=0)                     s, t
    Axis(dim=0, rows=2)             s1, s2, t1, t2    as of ``x.flatten(0, 1)``
    Axis(dim=0, rows=2, views=2)    s1, t1, s2, t2    as of ``torch.cat([view1, view2])``

Layouts are learned from batches that the layers compute whole and in micro-batches (``learn``). If
the values of a batch fit several, such as those of a mask that is all true, other batches decide;
until then a batch for which it makes a difference has to run as one micro-batch. A tensor without
samples, such as a mask of positions, is alike in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_axosparse.pipeline.crossing.message import Activation
from lightning_axosparse.pipeline.crossing.placeholder import (
    LEAVES,
    Placeholder,
    TensorDescription,
    values_in,
    with_tensors,
)
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.support.object_trees import TakenApart, object_map


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

    def fits(self, shape: torch.Size, size: int) -> bool:
        """Whether a tensor of ``size`` samples with this layout may have a shape."""
        return self.dim < len(shape) and shape[self.dim] == self.rows * size

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


SampleLayout = Axis | Literal["alike", "mean", "sum"]
"""How the tensor of the whole batch follows from those of micro-batches: by joining the rows, or,
if it has no samples, as the same tensor, their mean weighted by samples, or their sum.
"""


@dataclass(frozen=True)
class SampleLayouts:
    """The layouts of tensors, by the place where the step computes them.

    Attributes:
        known: the layouts that have fitted the values of a tensor so far, the best one first.
        one_view: whether a tensor of unknown layout has one view of the samples, as no batch could
            be compared.
        compares: whether the present run compares a batch with its micro-batches.
    """

    known: dict[Hashable, Sequence[SampleLayout]] = field(default_factory=dict)
    one_view: bool = False
    compares: bool = False

    def of(self, key: Hashable, parts: Sequence[Any], sizes: Sequence[int]) -> list[SampleLayout]:
        """Return the possible layouts of a tensor; none if no layout fits.

        Args:
            key: the place where the step computes it.
            parts: the tensors of the micro-batches, or descriptions of them.
            sizes: number of samples in each micro-batch.
        """
        shapes = [part.shape for part in parts]
        fitting = [
            layout
            for layout in self.known.get(key, ())
            if not isinstance(layout, Axis) or all(map(layout.fits, shapes, sizes))
        ]
        return fitting or _by_shape(shapes, sizes)[: 1 if self.one_view else None]

    def narrow(self, key: Hashable, fitting: Sequence[SampleLayout]) -> None:
        """Exclude the layouts of a tensor that do not fit its values in one more batch."""
        both = [layout for layout in fitting if layout in self.known.get(key, fitting)]
        self.known[key] = both or fitting


def _by_shape(shapes: Sequence[torch.Size], sizes: Sequence[int]) -> list[SampleLayout]:
    """Return the layouts by the shapes: samples are along the first dimension that grows with them.

    Shapes (2, 5, 8) and (3, 5, 8) of 2 and 3 samples give ``[Axis(0)]``.
    """
    first = shapes[0]
    if len(set(map(len, shapes))) > 1:
        return []
    for dim in range(len(first)):
        rows, rest = divmod(first[dim], sizes[0])
        others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
        if not rest and rows and len(others) == 1 and all(map(Axis(dim, rows).fits, shapes, sizes)):
            return list(_with_views(dim, rows))
    return ["alike"] if len(set(shapes)) == 1 else []


def _with_views(dim: int, rows: int) -> Iterator[Axis]:
    return (Axis(dim, rows, views) for views in range(1, rows + 1) if rows % views == 0)


def fitting_layouts(
    whole: Tensor,
    parts: Sequence[Tensor],
    sizes: Sequence[int],
    tolerance: float,
    may_reduce: bool = False,
) -> tuple[list[SampleLayout], float]:
    """Return the layouts with which micro-batches' tensors make up that of the whole batch.

    Args:
        whole: the tensor of the whole batch.
        parts: those of its micro-batches.
        sizes: number of samples in each micro-batch.
        tolerance: largest relative difference of values that count as equal.
        may_reduce: whether the tensors may be means or sums over samples.

    Returns:
        The layouts, the best one first, and the relative difference that it leaves. If none is
        within the tolerance, that one alone; none and infinity if the shapes do not fit.
    """
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
    if not candidates:
        return [], float("inf")
    if whole.is_meta:
        return candidates, 0.0
    tried: list[tuple[float, SampleLayout]] = []
    for layout in candidates:
        joined = parts if layout == "alike" else [joined_by(layout, parts, sizes)]
        tried.append((max(difference(each, whole) for each in joined), layout))
    return closest(tried, tolerance), min(by for by, _ in tried)


L = TypeVar("L", bound="SampleLayout")


def closest(tried: Sequence[tuple[float, L]], tolerance: float) -> list[L]:
    """Return the layouts with the least difference, but for rounding, the best one first.

    Args:
        tried: layouts, with the relative difference that each one leaves.
        tolerance: largest relative difference of values that count as equal.
    """
    least = min(by for by, _ in tried)
    most = min(max(10 * least, tolerance / 1000), tolerance)
    by_difference = sorted(tried, key=lambda pair: pair[0])
    return [layout for by, layout in by_difference if by <= max(least, most)]


_FILL, _SCORES = 1e4, 1e-2
"""Entries to which a mask was added have at least this magnitude, as with -1e4 or -1e9; scores
change them by no more than this fraction."""


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors of one shape, relative to the largest entry.

    If a mask makes some entries far larger, others are also compared among themselves.
    """
    if not (one.is_floating_point() or one.is_complex()):
        return float((one != other).double().mean()) if one.numel() else 0.0
    finite, infinite = other.isfinite(), other.isinf()
    is_alike = torch.equal(one.isfinite(), finite) and torch.equal(one.isinf(), infinite)
    if not is_alike or not torch.equal(one[infinite], other[infinite]):
        return 1.0
    return float(_relative_difference(one, other))


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Return whether two tensors of one shape differ by more than rounding, on their device."""
    if not (one.is_floating_point() or one.is_complex()):
        return (one != other).any()
    is_more = _relative_difference(one, other) > rounding(other.dtype)
    return is_more | (one.isnan() != other.isnan()).any()


def _relative_difference(one: Tensor, other: Tensor) -> Tensor:
    dtype = torch.promote_types(other.dtype, torch.float32)
    one, other = one.to(dtype), other.to(dtype)
    # Equal infinities have no difference; others have an infinite one.
    apart, entries = (one - other).abs().nan_to_num(0.0, posinf=torch.inf), other.abs()
    if not other.numel():
        return apart.sum()
    entries = entries.nan_to_num(0.0, posinf=0.0)
    large = entries >= _FILL
    is_mask = entries.masked_fill(~large, torch.inf).min() >= (1 - _SCORES) * entries.max()
    others = _ratio(apart.masked_fill(large, 0.0).max(), entries.masked_fill(large, 0.0).max())
    return torch.maximum(_ratio(apart.max(), entries.max()), torch.where(is_mask, others, 0.0))


def _ratio(apart: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest > 0, apart / largest, (apart > 0).to(apart.dtype))


def rounding(dtype: torch.dtype) -> float:
    """Return a relative difference that rounding hardly ever makes."""
    has_eps = dtype.is_floating_point or dtype.is_complex
    return torch.finfo(dtype).eps ** 0.5 if has_eps else 0.0


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
    return list(_with_views(unequal[0], rows))


def joined_by(layout: SampleLayout, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Join the tensors of micro-batches to that of the whole batch."""
    if isinstance(layout, Axis):
        return layout.cat(parts)
    if layout == "alike":
        return parts[0]
    shares = [1.0 if layout == "sum" else size / sum(sizes) for size in sizes]
    return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)


class Joined(NamedTuple):
    """The layer outputs of a whole batch.

    Attributes:
        activation: the activation of the whole batch, as a stage would receive it.
        tensors: the tensors in it, leaves of a new graph.
        graphs: for each of them, the joined tensor, and the leaves that it is joined from: the
            tensors of the micro-batches, detached.
    """

    activation: Activation
    tensors: Sequence[Tensor]
    graphs: Sequence[tuple[Tensor, Sequence[Tensor]]]

    def split(self, gradients: Sequence[Tensor | None]) -> list[Sequence[Tensor | None]]:
        """Split the gradient of each tensor into those of the micro-batches' tensors."""
        return [
            [None] * len(parts)
            if gradient is None
            else torch.autograd.grad(joined, parts, gradient, allow_unused=True)
            for (joined, parts), gradient in zip(self.graphs, gradients, strict=True)
        ]

    def gradients(self, microbatches: int) -> list[list[Tensor | None]]:
        """Return, for each micro-batch, the gradients of the tensors in its activation."""
        by_tensor = self.split([tensor.grad for tensor in self.tensors])
        return [[parts[number] for parts in by_tensor] for number in range(microbatches)]


def join(
    activations: Sequence[Activation],
    sizes: Sequence[int],
    layouts: SampleLayouts,
) -> Joined:
    """Join the activations of the micro-batches of a batch.

    Args:
        activations: the activations of all micro-batches, in order.
        sizes: number of samples in each micro-batch.
        layouts: the known layouts of their tensors.

    Raises:
        RunAgain: if it is not known which rows of a tensor belong to which sample.
    """
    keyed = [keyed_values(activation) for activation in activations]
    outputs = [activation.output for activation in activations]
    numbers = [[] if isinstance(output, Tensor) else _numbers(output) for output in outputs]
    keys = [[key for key, _ in own] for own in keyed]
    read = [activation.numbers for activation in activations]
    alike: tuple[list[Any], ...] = numbers, read, keys
    if any(each.count(each[0]) < len(each) for each in alike):
        raise RunAgain(Rerun.SAMPLES)
    tensors, graphs = list[Tensor](), list[tuple[Tensor, Sequence[Tensor]]]()
    values: list[Any] = []
    for key, parts in zip(
        keys[0], zip(*([v for _, v in own] for own in keyed), strict=True), strict=True
    ):
        possible = layouts.of(key, parts, sizes)
        if not possible:
            raise RunAgain(Rerun.SAMPLES)
        if isinstance(parts[0], TensorDescription):
            values.append(_joined_description(parts, possible[0]))
            continue
        requires_grad = any(part.requires_grad for part in parts)
        leaves = [part.detach().requires_grad_(requires_grad) for part in parts]
        joined = joined_by(possible[0], leaves, sizes)
        tensor = joined.detach()
        if len(parts) > 1:
            _validate_joined(tensor, possible, parts, sizes)
        graphs.append((joined, leaves))
        tensors.append(tensor.requires_grad_(requires_grad))
        values.append(tensor)
    return Joined(_with_values(activations[0], iter(values)), tensors, graphs)


def _validate_joined(
    joined: Tensor, possible: Sequence[SampleLayout], parts: Sequence[Tensor], sizes: Sequence[int]
) -> None:
    """Check that a tensor without samples is that of all micro-batches.

    If several layouts are possible, check that it makes no difference which one a tensor has.

    Raises:
        RunAgain: if the joined values differ, or if gradients would go to other rows.
    """
    detached = [part.detach() for part in parts]
    is_trained = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    layout, *others = possible
    same = [*detached] if layout == "alike" else []
    same += [joined_by(other, detached, sizes) for other in others]
    is_unclear = is_trained and any(isinstance(other, Axis) for other in others)
    differ = (each.shape != joined.shape or bool(differs(each, joined)) for each in same)
    if is_unclear or any(differ):
        raise RunAgain(Rerun.SAMPLES)


def _with_values(activation: Activation, values: Iterator[Any]) -> Activation:
    """Replace the tensors and descriptions in an activation, in their order."""

    def replaced(tree: Any) -> Any:
        return object_map(LEAVES, lambda value: next(values), tree)

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
    whole: Activation, parts: Sequence[Activation], sizes: Sequence[int], tolerance: float
) -> tuple[Mapping[Hashable, Sequence[SampleLayout]], list[tuple[Hashable, float]]]:
    """Learn the layouts with which the activations of micro-batches join to that of the batch.

    Returns:
        The layouts, and the relative difference after joining, of the tensor of each place.
    """
    keyed = [keyed_values(activation) for activation in parts]
    numbers = [_numbers(activation.output) for activation in (whole, *parts)]
    known: dict[Hashable, Sequence[SampleLayout]] = {}
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
            layouts, apart = fitting_layouts(shapes[0], shapes[1:], sizes, tolerance)
        else:
            detached = [part.detach() for part in values]
            may_reduce = not (isinstance(key, tuple) and key[0] == "output")
            layouts, apart = fitting_layouts(value.detach(), detached, sizes, tolerance, may_reduce)
        if layouts:
            known[key] = layouts
        differences.append((key, apart))
    return known, differences


def _numbers(tree: Any) -> list[Any]:
    """Return the plain values in nested containers, which must not depend on the samples."""
    if isinstance(tree, TakenApart):  # Perhaps of a named tuple or a dict.
        return _numbers(with_tensors(tree, _tensor))
    if isinstance(tree, (list, tuple)):
        return [number for child in tree for number in _numbers(child)]
    if isinstance(tree, dict):
        return [number for child in tree.values() for number in _numbers(child)]
    return [tree] if isinstance(tree, (bool, int, float, str)) else []


def _tensor(leaf: int, value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else Placeholder.of(value, None, "an output")


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
