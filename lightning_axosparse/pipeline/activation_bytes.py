"""Measures the bytes that a forward pass keeps for its backward pass, and its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_axosparse.support.torch_internals import OperatorMode, storage_id, tree_leaves


@contextmanager
def activation_bytes(device: torch.device, received: Any) -> Iterator[Callable[[], int]]:
    """Measure a forward pass; call what is yielded after it for the bytes that it keeps.

    What the pass received counts, as it is kept as long; parameters, buffers and their views do
    not. Results do not change. On CPU, what the kernels of a compiled layer keep is not measured.

    Args:
        device: where the pass computes.
        received: a pytree of tensors that are kept as long as what the pass keeps.
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
    """Measure the most bytes that are allocated at a time; call what is yielded after it for them.

    Args:
        device: where is computed.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    with _Peak() as new:
        yield lambda: new.peak


class _NewStorages(OperatorMode):
    """Records the storages that operators allocate inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for key, storage in _storages((args, kwargs)).items():
            if key not in self._made:
                self._given[key] = StorageWeakRef(storage)
        output = func(*args, **(kwargs or {}))
        for key, storage in _storages(output).items():
            if key not in self._given:
                self._made[key] = StorageWeakRef(storage), storage.nbytes()
        return output

    def bytes_alive(self) -> int:
        """Bytes of the storages that still exist."""
        return sum(size for storage, size in self._made.values() if not storage.expired())


class _Peak(_NewStorages):
    """Records the most bytes that such storages have at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return output


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of a pytree's tensors; a wrapper such as a sparse weight has no storage."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if _has_storage(leaf))
    return {storage_id(storage): storage for storage in storages}


def _has_storage(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and not leaf.is_meta
        and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
    )
