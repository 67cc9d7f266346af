"""Activations: how many bytes a forward pass leaves behind for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def kept_bytes(device: torch.device, received: Any) -> Iterator[Callable[[], int]]:
    """Measure a forward pass; call what is yielded, behind it, for the bytes that it keeps.

    What it received counts, as it lives as long; parameters, buffers and their views do not.
    Numbers are left alone. On CPU, what a compiled layer's own kernels keep is not seen.

    Args:
        device: where the pass computes.
        received: a pytree of tensors that live as long as what the pass keeps.
    """
    arrived = sum(storage.nbytes() for storage in _storages(received).values())
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield lambda: arrived + torch.cuda.memory_allocated(device) - before
        return
    with _NewStorages() as new:
        yield lambda: arrived + new.bytes_alive()


class _NewStorages(TorchDispatchMode):
    """Knows the storages that operators have made inside it, each once, while they are alive."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch.compile would leave what it meets here uncompiled for good."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        return sum(size for storage, size in self._made.values() if not storage.expired())


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of a pytree's tensors; a wrapper such as a sparse weight has none of its own."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if _has_storage(leaf))
    return {storage._cdata: storage for storage in storages}


def _has_storage(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and not leaf.is_meta
        and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
    )
