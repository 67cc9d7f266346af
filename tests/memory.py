"""Measures and limits the memory of this process."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Records the storages of operators' results, except views of tensors from before."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


def touched(is_file: Callable[[str], bool]) -> int:
    """Return the resident bytes of the mapped files that ``is_file`` selects by their lines."""
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            is_inside = is_file(line)
        elif is_inside and key == "Rss:":
            found += 1024 * int(values[0])
    return found


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Limit the address space to ``more`` bytes beside those that are mapped now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
