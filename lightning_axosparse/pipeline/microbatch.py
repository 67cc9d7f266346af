"""Micro-batches: cutting a batch into them, and putting what they return together again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_axosparse.grid import divisors
from lightning_axosparse.pipeline.batch_layout import (
    ASK,
    BatchLayout,
    Path,
    arrays,
    children,
    inferred,
    is_array,
    nested_lists,
    rebuilt,
    spelled,
)
from lightning_axosparse.pipeline.reductions import Weighting, combine


class MicroBatch(NamedTuple):
    """A part of a batch.

    ``size`` counts its samples; ``weight`` is its share of the batch; ``number`` is its place.
    """

    batch: Any
    size: int
    weight: float
    number: int = 0


class Scalar(NamedTuple):
    """A scalar that a step returned, and how it counts in that of the whole batch."""

    value: Tensor
    weighting: Weighting


def split(batch: Any, microbatches: int, layout: BatchLayout | None = None) -> list[MicroBatch]:
    """Cut a batch into nearly equal parts along its batch dimensions.

    Args:
        batch: any nesting of tensors and numpy arrays in dicts, lists, tuples, named tuples and
            dataclasses, whose types the parts keep.
        microbatches: number of parts wanted; a batch of fewer samples gives one a sample.
        layout: what is cut along which dimension; None: what the batch by itself suggests.

    Raises:
        ValueError: if leaves that are cut differ in length, or it is not clear what to cut.
    """
    layout = layout or inferred(batch)
    count = one_size(layout.sizes(batch))
    parts = max(1, min(microbatches, count))
    bounds = [count * i // parts for i in range(parts + 1)]
    if parts == 1:
        return [MicroBatch(batch, count, 1.0)]
    return [
        MicroBatch(layout.cut(batch, lo, hi), hi - lo, (hi - lo) / count, number)
        for number, (lo, hi) in enumerate(pairwise(bounds))
    ]


def one_size(sizes: Mapping[Path, int]) -> int:
    """The number of samples that all leaves which are cut have; 1 if none is cut.

    Raises:
        ValueError: if they differ.
    """
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{spelled(path)}: {size}" for path, size in sizes.items())
        raise ValueError(
            f"Parts of the batch have different numbers of samples ({told}), so it is not clear "
            f"where micro-batches begin. {ASK}"
        )
    return next(iter(sizes.values()), 1)


def even_parts(samples: int, wanted: int, sharing: int = 1) -> int:
    """The number of equal parts of a batch that is closest, by ratio, to the one wanted.

    The mean over equal parts is the mean over the batch, also where a user's code takes it.

    Args:
        samples: samples in the batch.
        wanted: parts wanted.
        sharing: replicas that share the parts, equally where the number of samples allows it.
    """
    even = divisors(samples) or [1]
    shared = [parts for parts in even if parts % sharing == 0]
    return min(shared or even, key=lambda parts: abs(log(parts / wanted)))


def weigh(batches: Sequence[Any], whole: Any = None) -> list[MicroBatch]:
    """Weigh micro-batches that a user's own function cut, by their samples.

    Args:
        batches: the parts.
        whole: the batch that they were cut from; the samples are counted along the first dimension,
            or in the first list, in which the parts add up to it. Otherwise the first dimension of
            the first array counts.
    """
    sizes = _added_up(batches, whole) or [samples(batch) for batch in batches]
    total = sum(sizes)
    return [
        MicroBatch(batch, size, size / total, number)
        for number, (batch, size) in enumerate(zip(batches, sizes, strict=True))
    ]


def _added_up(batches: Sequence[Any], whole: Any) -> list[int] | None:
    """How the parts of a batch divide the first of its dimensions that they divide at all."""
    if len(batches) < 2:
        return None
    measured = [_lengths(batch) for batch in batches]
    for place, length in _lengths(whole).items():
        sizes = [lengths.get(place, 0) for lengths in measured]
        if length and sum(sizes) == length:
            return sizes
    return None


def _lengths(batch: Any) -> dict[tuple[Path, int], int]:
    """The length of every list, and then of every dimension of an array."""
    found: dict[tuple[Path, int], int] = {}
    for path, leaf in arrays(batch):
        found.update({(path, dim): size for dim, size in enumerate(leaf.shape)})
    lists = {(path, 0): len(node) for path, node in nested_lists(batch)}
    return {**lists, **found}


def share(microbatches: Sequence[MicroBatch], index: int, shares: int) -> Sequence[MicroBatch]:
    """One of so many consecutive and nearly equal shares of a batch's micro-batches."""
    count = len(microbatches)
    return microbatches[count * index // shares : count * (index + 1) // shares]


def samples(batch: Any) -> int:
    """Count the samples of a batch: the first dimension of its first array that has one."""
    return next((leaf.shape[0] for _, leaf in arrays(batch)), 1)


def merge(
    outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int] | None = None
) -> Any:
    """Put what the micro-batches of one batch returned together.

    Tensors and arrays with dimensions are concatenated, scalars combined as they are weighted,
    containers merged entry by entry, lists of plain values or of one entry per sample joined. What
    only some micro-batches returned, or was None in others, is merged from those that have it. An
    int that is each micro-batch's number of samples is added up. Of any other value the first is
    taken, with a warning if they differ.

    Args:
        outputs: what a step returned for each micro-batch, its scalar tensors as :class:`Scalar`.
        weights: each micro-batch's share of the batch.
        sizes: samples of each micro-batch; None where they are not known.

    Raises:
        ValueError: if micro-batches returned different types under one key.
    """
    parts = [
        _Returned(out, weight, None if sizes is None else size)
        for out, weight, size in zip(outputs, weights, sizes or weights, strict=True)
    ]
    if len(outputs) == 1:
        return apply_to_collection(outputs[0], Scalar, lambda scalar: scalar.value)
    return _merged(parts, "")


class _Returned(NamedTuple):
    """What the step returned for one micro-batch, or an entry of it."""

    value: Any
    weight: float
    size: float | None


def _merged(parts: Sequence[_Returned], path: str) -> Any:
    parts = _present(parts)
    if not parts:
        return None
    outputs = [part.value for part in parts]
    first = outputs[0]
    _refuse_mixture(outputs, path)
    if isinstance(first, Scalar):
        values, weightings = zip(*outputs, strict=True)
        return combine(values, weightings, [part.weight for part in parts])
    if isinstance(first, Tensor):
        return torch.cat(outputs, _batch_dim(parts))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs, _batch_dim(parts))
    if isinstance(first, (np.ndarray, float, np.floating)):
        return sum(part.value * part.weight for part in parts)
    if isinstance(first, (list, tuple)) and _is_joined(parts):
        return type(first)(entry for out in outputs for entry in out)
    if any(children(out) for out in outputs):
        return _merged_entries(parts, path)
    if isinstance(first, int) and not isinstance(first, bool) and _are_sizes(parts):
        return sum(outputs)
    if not all(_same(out, first) for out in outputs):
        warnings.warn(
            f"The micro-batches of a batch returned different values in output{path} ({first!r} "
            "and others), of which the first is kept: how they make up the batch's value cannot be "
            "known. Return a tensor with one entry per sample, or a float or scalar tensor, which "
            "is averaged.",
            stacklevel=2,
        )
    return first


def _present(parts: Sequence[_Returned]) -> Sequence[_Returned]:
    """Those that returned something, with weights that make up one again."""
    present = [part for part in parts if part.value is not None]
    if len(present) == len(parts):
        return parts
    total = sum(part.weight for part in present)
    return [part._replace(weight=part.weight / total) for part in present if total]


def _refuse_mixture(outputs: Sequence[Any], path: str) -> None:
    kinds = {_kind(out) for out in outputs}
    if len(kinds) > 1:
        raise ValueError(
            f"The micro-batches of one batch returned different things in output{path}: "
            f"{' and '.join(sorted(kinds))}. A step (`training_step`, `validation_step`, ...) has "
            "to return the same structure for every part of a batch; keys of a dict may be missing."
        )


def _kind(out: Any) -> str:
    if is_array(out):
        return f"{type(out).__name__} {'with' if out.ndim else 'without'} dimensions"
    return "Tensor without dimensions" if isinstance(out, Scalar) else type(out).__name__


def _batch_dim(parts: Sequence[_Returned]) -> int:
    """The dimension that has an entry per sample, if one has; else the first."""
    shapes = [part.value.shape for part in parts]
    for dim in range(len(shapes[0])):
        if all(shape[dim] == part.size for shape, part in zip(shapes, parts, strict=True)):
            return dim
    return 0


def _is_joined(parts: Sequence[_Returned]) -> bool:
    """Whether lists are put behind one another, rather than merged entry by entry."""
    first = parts[0].value
    if hasattr(first, "_fields"):
        return False
    held = [[leaf.shape[0] for _, leaf in arrays(part.value)] for part in parts]
    if all(len(part.value) == part.size for part in parts):
        return not all(
            lengths and all(length == part.size for length in lengths)
            for part, lengths in zip(parts, held, strict=True)
        )
    lengths = {len(part.value) for part in parts}
    return len(lengths) > 1 or (isinstance(first, list) and not any(_has_tensor(p) for p in first))


def _has_tensor(out: Any) -> bool:
    return is_array(out) or any(_has_tensor(child) for child in children(out).values())


def _merged_entries(parts: Sequence[_Returned], path: str) -> Any:
    each = [children(part.value) for part in parts]
    keys = dict.fromkeys(key for entries in each for key in entries)
    entries = {
        key: [part._replace(value=own.get(key)) for part, own in zip(parts, each, strict=True)]
        for key in keys
    }
    return rebuilt(
        parts[0].value,
        {key: _merged(values, path + key.text) for key, values in entries.items()},
    )


def _are_sizes(parts: Sequence[_Returned]) -> bool:
    return all(part.value == part.size for part in parts)


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False
