"""Micro-batches: splitting a batch, and counting the samples in its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import nn

from lightning_axosparse.pipeline.batch_layout import (
    BatchLayout,
    Path,
    arrays,
    inferred,
    nested_lists,
    path_text,
)


class MicroBatch(NamedTuple):
    """A part of a batch.

    Attributes:
        batch: the part, of the type of the batch.
        size: number of samples.
        begin: index of the first of these samples in the batch.
    """

    batch: Any
    size: int
    begin: int = 0


def split(batch: Any, microbatches: int, layout: BatchLayout | None = None) -> list[MicroBatch]:
    """Split a batch into nearly equal parts along its batch dimensions.

    Args:
        batch: any nesting of tensors and numpy arrays in dicts, lists, tuples, named tuples and
            dataclasses, whose types the parts have, too.
        microbatches: number of parts wanted; a batch of fewer samples is split into single ones.
        layout: the leaves to split, with their dimensions; None to infer it from the batch.

    Raises:
        ValueError: if the leaves to split differ in length, or cannot be inferred.
    """
    layout = layout or inferred(batch)
    count = one_size(layout.sizes(batch))
    parts = max(1, min(microbatches, count))
    bounds = [count * i // parts for i in range(parts + 1)]
    if parts == 1:
        return [MicroBatch(batch, count)]
    return [MicroBatch(layout.cut(batch, lo, hi), hi - lo, lo) for lo, hi in pairwise(bounds)]


def one_size(sizes: Mapping[Path, int]) -> int:
    """Return the number of samples that all leaves have; 1 if there are no leaves.

    Raises:
        ValueError: if the numbers differ.
    """
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path_text(path)}: {size}" for path, size in sizes.items())
        raise ValueError(
            f"parts of the batch have different numbers of samples ({listed}), so it is not clear "
            "where micro-batches begin"
        )
    return next(iter(sizes.values()), 1)


def counted(batches: Sequence[Any], whole: Any = None) -> list[MicroBatch]:
    """Count the samples in the micro-batches that a user's function has made.

    Args:
        batches: the parts.
        whole: the whole batch. Samples are counted in its first list, or along its first dimension
            of an array, whose length is the sum of the lengths in the parts; if there is none,
            along the first dimension of each part's first array.
    """
    sizes = _added_up(batches, whole) or [samples(batch) for batch in batches]
    begins = accumulate(sizes, initial=0)
    return [MicroBatch(*each) for each in zip(batches, sizes, begins, strict=False)]


def _added_up(batches: Sequence[Any], whole: Any) -> list[int] | None:
    """Return the sizes of the parts in the first list or dimension in which they add up."""
    if len(batches) < 2:
        return None
    measured = [_lengths(batch) for batch in batches]
    for place, length in _lengths(whole).items():
        sizes = [lengths.get(place, 0) for lengths in measured]
        if length and sum(sizes) == length:
            return sizes
    return None


def _lengths(batch: Any) -> dict[tuple[Path, int], int]:
    """Return the length of every list, and then of every dimension of an array."""
    lengths = {(path, 0): len(node) for path, node in nested_lists(batch)}
    for path, leaf in arrays(batch):
        lengths.update({(path, dim): size for dim, size in enumerate(leaf.shape)})
    return lengths


def samples(batch: Any) -> int:
    """Return the length of the first dimension of a batch's first array that has dimensions."""
    return next((leaf.shape[0] for _, leaf in arrays(batch)), 1)


Norm = nn.modules.batchnorm._BatchNorm


def fewest_samples(module: nn.Module) -> int:
    """Return the smallest number of samples from which every norm of a module gets statistics.

    It does not depend on which norms are in training mode, so that all ranks have the same number.
    """
    return 2 if any(isinstance(part, Norm) for part in module.modules()) else 1
