"""BatchNorms on micro-batches: the samples that they need for their statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.support.troubleshooting import see

Norm = nn.modules.batchnorm._BatchNorm


def fewest_samples(module: nn.Module) -> int:
    """The fewest samples of which every norm in a module can make statistics.

    It does not depend on which norms train just now, so that all ranks have the same number.
    """
    return 2 if any(isinstance(part, Norm) for part in module.modules()) else 1


@contextmanager
def statistics_explained(part: MicroBatch, microbatches: Sequence[MicroBatch]) -> Iterator[None]:
    """Say in terms of micro-batches what torch says of statistics of one value."""
    try:
        yield
    # A compiled layer has errors of another type, which quote that of torch.
    except (ValueError, RuntimeError) as error:
        count = sum(each.size for each in microbatches)
        if part.size > 1 or count < 2 or "more than 1 value per channel" not in str(error):
            raise
        raise MisconfigurationException(
            f"A BatchNorm makes its statistics of a micro-batch, and one has a single sample: "
            f"{count} samples are divided into {len(microbatches)} micro-batches. Give "
            f"AxoSparseStrategy(microbatches=...) at most {count // 2}, or batches at least "
            f"{2 * len(microbatches)} samples (drop_last=True leaves out a last one that is "
            "smaller)." + see("batches")
        ) from error
