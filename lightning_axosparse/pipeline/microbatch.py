"""Micro-batches: cutting a batch into them, and putting what they return together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

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


def split(batch: Any, microbatches: int) -> list[MicroBatch]:
    """Cut every tensor of a batch along its first dimension into nearly equal parts.

    Tensors without dimensions are handed to every micro-batch whole, lists and tuples of one
    non-tensor a sample are cut like tensors.

    Args:
        batch: any nesting of tensors in dicts, lists, tuples, named tuples and dataclasses.
        microbatches: number of parts wanted; a batch of fewer samples gives one a sample.

    Raises:
        ValueError: if tensors differ in their first dimension.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) > 1:
        raise ValueError(
            f"Tensors of the batch have different first dimensions {sorted(sizes)}, so it is not "
            "clear where micro-batches begin. Give AxoSparseStrategy(split_batch=...) a function "
            "(batch, microbatches) -> list of micro-batches."
        )
    samples = sizes.pop() if sizes else 1
    parts = max(1, min(microbatches, samples))
    bounds = [samples * i // parts for i in range(parts + 1)]
    if parts == 1:
        return [MicroBatch(batch, samples, 1.0)]
    return [
        MicroBatch(_cut(batch, lo, hi, samples), hi - lo, (hi - lo) / samples, number)
        for number, (lo, hi) in enumerate(pairwise(bounds))
    ]


def weigh(batches: Sequence[Any]) -> list[MicroBatch]:
    """Weigh micro-batches that a user's own function cut, by the samples of their first tensor."""
    firsts = [next((t for t in _tensors(batch) if t.dim()), None) for batch in batches]
    sizes = [1 if first is None else first.shape[0] for first in firsts]
    total = sum(sizes)
    return [
        MicroBatch(batch, size, size / total, number)
        for number, (batch, size) in enumerate(zip(batches, sizes, strict=True))
    ]


def share(microbatches: Sequence[MicroBatch], index: int, shares: int) -> Sequence[MicroBatch]:
    """One of so many consecutive and nearly equal shares of a batch's micro-batches."""
    count = len(microbatches)
    return microbatches[count * index // shares : count * (index + 1) // shares]


def samples(batch: Any) -> int:
    """Count the samples of a batch: the first dimension of its first tensor that has one."""
    return next((tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()), 1)


def merge(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Put what the micro-batches of one batch returned together.

    Tensors with dimensions are concatenated, scalars combined as they are weighted, dicts, tuples
    and lists of equal length merged entry by entry; anything else is taken from the first
    micro-batch.

    Args:
        outputs: what a step returned for each micro-batch, its scalar tensors as :class:`Scalar`.
        weights: each micro-batch's share of the batch.
    """
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return apply_to_collection(first, Scalar, lambda scalar: scalar.value)
    if isinstance(first, Scalar):
        return combine([o.value for o in outputs], [o.weighting for o in outputs], weights)
    if isinstance(first, Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, Mapping):
        return {key: merge([out[key] for out in outputs], weights) for key in first}
    if isinstance(first, (list, tuple)):
        return _merge_sequences(outputs, weights)
    if isinstance(first, float):
        return sum(out * w for out, w in zip(outputs, weights, strict=True))
    return first


def _merge_sequences(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    first = outputs[0]
    if not _tensors(first) and not hasattr(first, "_fields"):
        return type(first)(entry for out in outputs for entry in out)
    merged = [merge(list(entries), weights) for entries in zip(*outputs, strict=True)]
    return type(first)(*merged) if hasattr(first, "_fields") else type(first)(merged)


def _children(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return []


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for child in _children(batch) for tensor in _tensors(child)]


def _cut(batch: Any, lo: int, hi: int, samples: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[lo:hi] if batch.dim() else batch
    if isinstance(batch, Mapping):
        cut = {key: _cut(value, lo, hi, samples) for key, value in batch.items()}
        return cut if type(batch) is dict else type(batch)(cut)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        if len(batch) == samples and not _tensors(batch):
            return batch[lo:hi]
        entries = [_cut(entry, lo, hi, samples) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    if is_dataclass(batch) and not isinstance(batch, type):
        cut = {f.name: _cut(getattr(batch, f.name), lo, hi, samples) for f in fields(batch)}
        return replace(batch, **cut)
    return batch
