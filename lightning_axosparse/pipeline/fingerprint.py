"""The fingerprint of a batch, with which stages check that they compute the same batch.

Every stage loads the batch itself. If samples are selected or transformed at random, differently on
each rank, the layers of one stage would be trained with the labels of another. So each activation
message carries the fingerprint of the batch, and the receiving stage compares it with its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_axosparse.support.troubleshooting import see

_SAMPLED = 4096
"""Number of evenly spread elements of a tensor on which a checksum depends."""


class BatchFingerprint(NamedTuple):
    """The fingerprint of a batch.

    Attributes:
        checksum: of the values of the whole batch, not of a micro-batch.
        place: position of the batch in the run, in words.
    """

    checksum: int = 0
    place: str = "the batch"

    def validate(self, received: int, stage: int) -> None:
        """Check that the previous stage computes the same batch.

        Raises:
            MisconfigurationException: if the fingerprints differ.
        """
        if received == self.checksum:
            return
        raise MisconfigurationException(
            f"In {self.place}, ranks that share a batch were given different ones (checksums: "
            f"stage {stage - 1}: {received:08x}, stage {stage}: {self.checksum:08x}), so the "
            "layers of one would be trained with the labels of another. "
            "Something that picks or transforms the samples is random in its own way on each rank: "
            "give the sampler, the dataset or the transform a seed that does not depend on the "
            "rank, and call `lightning.seed_everything(seed, workers=True)` if loader workers draw "
            "at random." + see("batches")
        )


def checksum(batch: object) -> int:
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
