"""Micro-batches: splitting a batch, counting samples, fingerprints, errors of layers about sizes.

Every stage loads the batch itself. If samples are selected or transformed at random, differently on
each rank, the layers of one stage would be trained with the labels of another. So each activation
message carries the fingerprint of the batch, and the receiving stage compares it with its own.
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
    path_text,
)
from lightning_axosparse.support.troubleshooting import see


class MicroBatch(NamedTuple):
    """A part of a batch.

    Attributes:
        batch: the part, of the type of the batch.
        size: number of samples.
        begin: index of the first of these samples in the batch.
        number: index of the micro-batch.
    """

    batch: Any
    size: int
    begin: int = 0
    number: int = 0


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
    return [
        MicroBatch(layout.cut(batch, lo, hi), hi - lo, lo, number)
        for number, (lo, hi) in enumerate(pairwise(bounds))
    ]


def one_size(sizes: Mapping[Path, int]) -> int:
    """Return the number of samples that all leaves have; 1 if there are no leaves.

    Raises:
        ValueError: if the numbers differ.
    """
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path_text(path)}: {size}" for path, size in sizes.items())
        raise ValueError(
            f"Parts of the batch have different numbers of samples ({listed}), so it is not clear "
            f"where micro-batches begin. {ASK}" + see("batches")
        )
    return next(iter(sizes.values()), 1)


def even_parts(samples: int, wanted: int, fewest_samples: int = 1) -> int:
    """Return the number of equal parts of a batch that is closest, by ratio, to the one wanted.

    With equal parts, the mean of their means is the mean over the batch, also in the user's code.

    Args:
        samples: number of samples in the batch.
        wanted: number of parts wanted.
        fewest_samples: smallest number of samples in a part, unless the batch has fewer.
    """
    even = [parts for parts in divisors(samples) if samples // parts >= fewest_samples] or [1]
    return min(even, key=lambda parts: abs(log(parts / wanted)))


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
    return [
        MicroBatch(batch, size, begin, number)
        for number, (batch, size, begin) in enumerate(zip(batches, sizes, begins, strict=False))
    ]


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


_SAMPLED = 4096
"""Number of evenly spread elements of a tensor on which a fingerprint depends."""


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
            MisconfigurationException: if the fingerprints differ.
        """
        self.compare({stage - 1: received, stage: self.fingerprint}, "stage")

    def compare(self, fingerprints: dict[int, int], who: str) -> None:
        """Check that all fingerprints are equal; ``who`` is the word for the owner of each.

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
    """Return the CRC-32 of values, types and shapes in a batch, in order; 0 if it has no values.

    Of large tensors and arrays it includes some thousand evenly spread elements, which takes tens
    of microseconds a tensor.
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
    """Return the smallest number of samples from which every norm of a module gets statistics.

    It does not depend on which norms are in training mode, so that all ranks have the same number.
    """
    return 2 if any(isinstance(part, Norm) for part in module.modules()) else 1


def explain_statistics(
    error: Exception, part: MicroBatch, microbatches: Sequence[MicroBatch]
) -> None:
    """Replace torch's error about the statistics of one value by one about micro-batches.

    A compiled layer raises errors of another type, which quote torch's.
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
    """Replace the error of a layer that needs certain numbers of samples."""
    if len(set(sizes)) == 1 or is_oom_error(error):
        return
    raise MisconfigurationException(
        f"A step raised {type(error).__name__} for one of {len(sizes)} micro-batches, which have "
        f"{', '.join(map(str, sizes))} samples: {error}\nIf a layer wants certain numbers of them, "
        "such as pairs, drop_last=True leaves out a last batch that is smaller, and split_batch= "
        "divides each batch as the layer wants it." + see("batches")
    ) from error
