"""BatchNorms on micro-batches: what they need, and running statistics of the whole batch.

Each micro-batch is normalized by its own statistics, as always. This is the deferred batch
normalization of torchgpipe (Kim et al., 2020, arXiv 2004.09910), over data-parallel ranks, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.support.patched import Forward, replaced_forward
from lightning_axosparse.support.torch_internals import never_compiled
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


class DeferredNorms:
    """The BatchNorms of a module, on a rank.

    Args:
        module: the user's module.
        layers: names of the pipelined layers.
        running_stage: returns the stage whose forward pass runs; None outside of forward passes.
        last_stage: the last one of this process. A norm outside the layers, which each stage runs,
            counts what this one sees.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Collection[str],
        running_stage: Callable[[], int | None],
        last_stage: int,
    ) -> None:
        self._module, self._running_stage, self._last_stage = module, running_stage, last_stage
        self._inside = tuple(f"{name}." for name in layers)
        self._norms: dict[str, Norm] = {}
        self._undo = ExitStack()
        self._sums: dict[str, Tensor] = {}

    def install(self) -> None:
        """Let the norms leave their running statistics to :meth:`update`."""
        for name, norm in self._module.named_modules():
            if isinstance(norm, Norm) and norm.running_mean is not None:
                self._norms[name] = norm
                make = partial(partial, self._forward, name, norm)
                self._undo.enter_context(replaced_forward(norm, make))

    def uninstall(self) -> None:
        """Give the norms their own ``forward`` back."""
        self._undo.close()
        self._norms.clear()

    # What it notes is no part of a layer that is compiled.
    @never_compiled
    def _forward(self, name: str, norm: Norm, own: Forward, x: Tensor) -> Any:
        stage = self._running_stage()
        counts = f"{name}.".startswith(self._inside) or stage == self._last_stage
        # Callbacks that freeze layers let norms track nothing for a while. Activation checkpointing
        # computes a layer again where no stage runs.
        updates = norm.training and norm.track_running_stats and torch.is_grad_enabled()
        if stage is None or not (counts and updates):
            return own(x)
        mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
        assert mean is not None
        assert variance is not None
        assert batches is not None
        before = [buffer.clone() for buffer in (mean, variance, batches)]
        momentum, norm.momentum = norm.momentum, 1.0
        try:
            output = own(x)
        finally:
            norm.momentum = momentum
        self._add(name, x.numel() // x.shape[1], mean.double(), variance.double())
        for buffer, value in zip((mean, variance, batches), before, strict=True):
            buffer.data.copy_(value)  # which autograd does not take for a change
        return output

    def _add(self, name: str, count: int, mean: Tensor, variance: Tensor) -> None:
        """Add the statistics of one micro-batch, of which ``variance`` is the unbiased one."""
        squares = variance * (count - 1) + mean.square() * count
        sums = torch.stack([torch.full_like(mean, count), mean * count, squares])
        self._sums[name] = self._sums.get(name, 0) + sums

    def forget_batch(self) -> None:
        """Drop the statistics of the micro-batches since the last :meth:`update`."""
        self._sums.clear()

    @torch.no_grad()
    def update(self, data_group: dist.ProcessGroup | None) -> None:
        """Update the running statistics by those of the batch; collective over the group."""
        norms = {
            name: norm
            for name, norm in self._norms.items()
            if norm.running_mean is not None and not norm.running_mean.is_meta
        }
        sums = [
            self._sums.get(name, torch.zeros_like(_mean(norm), dtype=torch.float64).expand(3, -1))
            for name, norm in norms.items()
        ]
        self._sums.clear()
        if data_group is not None and sums:
            whole = torch.cat([each.flatten() for each in sums])
            dist.all_reduce(whole, group=data_group)
            parts = whole.split([each.numel() for each in sums])
            sums = [part.view_as(each) for part, each in zip(parts, sums, strict=True)]
        for norm, (counts, means, squares) in zip(norms.values(), sums, strict=True):
            if counts[0]:
                _update(norm, counts[0], means / counts, squares)


def _mean(norm: Norm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _update(norm: Norm, count: Tensor, mean: Tensor, squares: Tensor) -> None:
    """Update running statistics as ``norm`` does by a batch of ``count`` values a channel."""
    batches, running = norm.num_batches_tracked, (norm.running_mean, norm.running_var)
    assert batches is not None
    batches += 1
    factor = 1 / float(batches) if norm.momentum is None else norm.momentum
    variance = (squares - count * mean.square()) / (count - 1)
    for buffer, value in zip(running, (mean, variance), strict=True):
        assert buffer is not None
        buffer.lerp_(value.to(buffer.dtype), factor)
