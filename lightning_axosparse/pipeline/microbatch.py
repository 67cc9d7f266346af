"""Splits a batch into micro-batches and counts samples; what norms need of them; fingerprints.

Every stage loads the batch itself. Where samples are picked or transformed at random, differently
on each rank, the layers of one stage would be trained with the labels of another. So each
activation message carries the fingerprint, and the stage that receives it compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import is_oom_error
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.pipeline.batch_layout import (
    ASK,
    BatchLayout,
    Path,
    arrays,
    inferred,
    nested_lists,
    spelled,
)
from lightning_axosparse.support.troubleshooting import see


class MicroBatch(NamedTuple):
    """A part of a batch.

    Attributes:
        batch: the part, of the type of the batch.
        size: number of its samples.
        begin: the place of the first of them in the batch.
        number: its index in the batch.
    """

    batch: Any
    size: int
    begin: int = 0
    number: int = 0


def split(batch: Any, microbatches: int, layout: BatchLayout | None = None) -> list[MicroBatch]:
    """Split a batch into nearly equal parts along its batch dimensions.

    Args:
        batch: any nesting of tensors and numpy arrays in dicts, lists, tuples, named tuples and
            dataclasses, whose types the parts keep.
        microbatches: number of parts wanted; a batch of fewer samples gives one for each sample.
        layout: what is split along which dimension; None to infer it from the batch.

    Raises:
        ValueError: if leaves that are cut differ in length, or it is not clear what to cut.
    """
    layout = layout or inferred(batch)
    count = one_size(layout.sizes(batch))
    parts = max(1, min(microbatches, count))
    bounds = [count * i // parts for i in range(parts + 1)]
    if parts == 1:
        return [MicroBatch(batch, count)]
    return [
        MicroBatch(layout.cut(batch, lo, hi), hi - lo, lo, number)
        for number, (lo, hi) in enumerate(pairwise(bounds))
    ]


def one_size(sizes: Mapping[Path, int]) -> int:
    """The number of samples that all leaves which are cut have; 1 if none is cut.

    Raises:
        ValueError: if they differ.
    """
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{spelled(path)}: {size}" for path, size in sizes.items())
        raise ValueError(
            f"Parts of the batch have different numbers of samples ({listed}), so it is not clear "
            f"where micro-batches begin. {ASK}" + see("batches")
        )
    return next(iter(sizes.values()), 1)


def even_parts(samples: int, wanted: int, fewest_samples: int = 1) -> int:
    """The number of equal parts of a batch that is closest, by ratio, to the one wanted.

    The mean over equal parts is the mean over the batch, also where a user's code takes it.

    Args:
        samples: samples in the batch.
        wanted: parts wanted.
        fewest_samples: of a part, unless the batch has fewer.
    """
    even = [parts for parts in divisors(samples) if samples // parts >= fewest_samples] or [1]
    return min(even, key=lambda parts: abs(log(parts / wanted)))


def counted(batches: Sequence[Any], whole: Any = None) -> list[MicroBatch]:
    """Count the samples in the micro-batches of a user's own function.

    Args:
        batches: the parts.
        whole: the batch that they are parts of; samples are counted along the first dimension, or
            in the first list, in which the sizes of the parts add up to it. Otherwise the first
            dimension of the first array counts.
    """
    sizes = _added_up(batches, whole) or [samples(batch) for batch in batches]
    begins = accumulate(sizes, initial=0)
    return [
        MicroBatch(batch, size, begin, number)
        for number, (batch, size, begin) in enumerate(zip(batches, sizes, begins, strict=False))
    ]


def _added_up(batches: Sequence[Any], whole: Any) -> list[int] | None:
    """The sizes of the parts along the first dimension of the batch in which they add up to it."""
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


def samples(batch: Any) -> int:
    """Count the samples of a batch: the first dimension of its first array that has one."""
    return next((leaf.shape[0] for _, leaf in arrays(batch)), 1)


_SAMPLED = 4096
"""Evenly spread elements of a tensor that a fingerprint depends on."""


class BatchFingerprint(NamedTuple):
    """The fingerprint of a batch.

    Attributes:
        fingerprint: checksum of the whole batch, not of a micro-batch.
        place: position of the batch in the run, in words.
    """

    fingerprint: int = 0
    place: str = "the batch"

    def validate(self, received: int, stage: int) -> None:
        """Check that the previous stage computes the same batch.

        Raises:
            MisconfigurationException: if it does not.
        """
        self.compare({stage - 1: received, stage: self.fingerprint}, "stage")

    def compare(self, fingerprints: dict[int, int], who: str) -> None:
        """Check that all fingerprints are the same.

        Raises:
            MisconfigurationException: if they are not.
        """
        if len(set(fingerprints.values())) == 1:
            return
        listed = ", ".join(f"{who} {n}: {value:08x}" for n, value in fingerprints.items())
        raise MisconfigurationException(
            f"In {self.place}, ranks that share a batch were given different ones (checksums: "
            f"{listed}), so the layers of one would be trained with the labels of another. "
            "Something that picks or transforms the samples is random in its own way on each rank: "
            "give the sampler, the dataset or the transform a seed that does not depend on the "
            "rank, and call `lightning.seed_everything(seed, workers=True)` if loader workers draw "
            "at random." + see("batches")
        )


def fingerprint(batch: object) -> int:
    """CRC-32 of values, types and shapes in a batch, in order; 0 if there are none.

    Of large tensors and arrays some thousand evenly spread elements count, which takes tens of
    microseconds a tensor.
    """
    crc = 0

    def add(leaf: object) -> object:
        nonlocal crc
        for data in _bytes(leaf):
            crc = zlib.crc32(data, crc)
        return leaf

    apply_to_collection(batch, (Tensor, np.ndarray, int, float, complex, str, bytes), add)
    return crc


def _bytes(leaf: Any) -> Iterator[bytes]:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        spread = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // _SAMPLED)]
        yield spread.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        yield f"{leaf.dtype}{leaf.shape}".encode()
        yield leaf.reshape(-1)[:: max(1, leaf.size // _SAMPLED)].tobytes()
    elif not isinstance(leaf, (Tensor, np.ndarray)):
        yield repr(leaf).encode()


Norm = nn.modules.batchnorm._BatchNorm


def fewest_samples(module: nn.Module) -> int:
    """The fewest samples of which every norm in a module can make statistics.

    It does not depend on which norms train just now, so that all ranks have the same number.
    """
    return 2 if any(isinstance(part, Norm) for part in module.modules()) else 1


def explain_statistics(
    error: Exception, part: MicroBatch, microbatches: Sequence[MicroBatch]
) -> None:
    """Raise in terms of micro-batches what torch says of statistics of one value.

    A compiled layer has errors of another type, which quote that of torch.
    """
    count = sum(each.size for each in microbatches)
    if part.size > 1 or count < 2 or "more than 1 value per channel" not in str(error):
        return
    raise MisconfigurationException(
        f"A BatchNorm makes its statistics of a micro-batch, and one has a single sample: "
        f"{count} samples are divided into {len(microbatches)} micro-batches. Give "
        f"AxoSparseStrategy(microbatches=...) at most {count // 2}, or batches at least "
        f"{2 * len(microbatches)} samples (drop_last=True leaves out a last one that is "
        "smaller)." + see("batches")
    ) from error


def explain_sizes(error: Exception, sizes: Sequence[int]) -> None:
    """Raise in terms of micro-batches what a layer says that wants certain numbers of samples."""
    if len(set(sizes)) == 1 or is_oom_error(error):
        return
    raise MisconfigurationException(
        f"A step raised {type(error).__name__} for one of {len(sizes)} micro-batches, which have "
        f"{', '.join(map(str, sizes))} samples: {error}\nIf a layer wants certain numbers of them, "
        "such as pairs, drop_last=True leaves out a last batch that is smaller, and split_batch= "
        "divides each batch as the layer wants it." + see("batches")
    ) from error
