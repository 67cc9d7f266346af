"""Measures the memory of forward passes in bytes, and the time of stages in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    storage_id,
    tree_leaves,
)
from lightning_axosparse.support.trace import clock, now
from lightning_axosparse.support.troubleshooting import see


@contextmanager
def activation_bytes(device: torch.device, received: Any) -> Iterator[Callable[[], int]]:
    """Measure the bytes that a forward pass in the context saves for backward.

    They include the tensors that the pass has received, which are saved as long, but no parameters,
    buffers and their views. On CPU, they do not include tensors that the kernels of a compiled
    layer save.

    Yields:
        A function that returns the bytes, to be called after the pass.
    """
    arrived = sum(storage.nbytes() for storage in _storages(received).values())
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield lambda: arrived + torch.cuda.memory_allocated(device) - before
        return
    with _NewStorages() as new:
        yield lambda: arrived + new.bytes_alive()


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the peak of allocated bytes; call the function that is yielded after the pass."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    with _Peak() as new:
        yield lambda: new.peak


class _NewStorages(PausableOperatorMode):
    """Records the storages that operators allocate inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}
        self._earlier: dict[int, StorageWeakRef] = {}

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for key, storage in _storages((args, kwargs)).items():
            if key not in self._new:
                self._earlier[key] = StorageWeakRef(storage)
        output = func(*args, **kwargs)
        for key, storage in _storages(output).items():
            if key not in self._earlier:
                self._new[key] = StorageWeakRef(storage), storage.nbytes()
        return output

    def bytes_alive(self) -> int:
        """Bytes of the storages that still exist."""
        return sum(size for storage, size in self._new.values() if not storage.expired())


class _Peak(_NewStorages):
    """Records the peak of the bytes of these storages."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = super().observe(func, args, kwargs)
        self._new = {key: new for key, new in self._new.items() if not new[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._new.values()))
        return output


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of a pytree's tensors; a wrapper such as a sparse weight has none."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if _has_storage(leaf))
    return {storage_id(storage): storage for storage in storages}


def _has_storage(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and not leaf.is_meta
        and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


_WARM_UP, _BATCHES = 1, 3
_UNEQUAL = 1.3
"""Ratio of the slowest stage's time to the mean above which the slowest stage is reported."""


class StageTimes:
    """The time of the first batches, and that in which this rank's stage computes.

    Args:
        group: the stages of the pipeline; None to compare nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._seconds = group, list[tuple[float, float]]()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Measure a training batch; after the last measured one, compare stages; collective."""
        began = _computing_seconds(), now()
        yield
        if self._group is not None and len(self._seconds) < _WARM_UP + _BATCHES:
            self._seconds.append((_computing_seconds() - began[0], now() - began[1]))
            if len(self._seconds) == _WARM_UP + _BATCHES:
                sums = map(sum, zip(*self._seconds[_WARM_UP:], strict=True))
                gathered = all_gather([total / _BATCHES for total in sums], self._group)
                computing, whole = zip(*gathered, strict=True)
                # The first rank of a pipeline has its last stage.
                _report(computing[::-1], max(whole))


def _computing_seconds() -> float:
    return clock.totals["forward"] + clock.totals["backward"]


def _report(seconds: Sequence[float], whole: float) -> None:
    """Report a stage that is much slower than the others, and a pipeline that gains nothing.

    Args:
        seconds: the time in which each stage computes a batch.
        whole: the time of a batch.
    """
    if whole > sum(seconds):
        rank_zero_info(
            f"A batch takes {1e3 * whole:,.0f} ms, in which the stages compute for "
            f"{1e3 * sum(seconds):,.0f} ms together: one process would be faster. Layers, or "
            "batches, are too small for the time of messages, or ranks wait for a core."
            + see("grid")
        )
    slowest, mean = max(seconds), sum(seconds) / len(seconds)
    if slowest > _UNEQUAL * mean:
        rank_zero_info(
            f"Stage {seconds.index(slowest)} computes {slowest / mean:.1f} times as long as the "
            f"mean stage: {', '.join(f'{1e3 * s:,.0f}' for s in seconds)} ms of a batch by stage. "
            "Try balance=[...] with the layers of each stage."
        )
