"""Counts the bytes that a step of GPT-3 XL (1.3B) would take on a GPU, without a GPU.

    python -m benchmarks.gpu.counted
    python -m benchmarks.gpu.counted --tiny

Runs the steps of ``step`` on CPU with one and with two blocks, and adds up the storages that exist
after every operator, which is what a GPU's allocator would be asked for. The bytes of one block are
extrapolated to all blocks. Workspaces of kernels and fragmentation are not counted. Prints a
Markdown table of the peaks.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.step import SHAPES, TINY, Shape, Training, masks, recompute
from lightning_axosparse import sparsify
from lightning_axosparse.sparse.module.parameters import layouts
from lightning_axosparse.sparse.store import layout
from lightning_axosparse.sparse.store.scratch import scratch

CPU = torch.device("cpu")


class Living(TorchDispatchMode):
    """Adds up the storages that exist, beginning with the given tensors.

    Attributes:
        peak: the largest sum so far, in bytes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = self._bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor and leaf.device == CPU:
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def gone(_: object) -> None:
            del self._storages[key]
            self._bytes -= size

        self._storages[key] = weakref.ref(storage, gone)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)


def peak(shape: Shape, ratio: float, recomputes: bool) -> int:
    """Return the peak bytes in the first two steps of a model of this shape."""
    model = shape.build(CPU)
    if ratio:
        sparsify(model, masks(model, ratio), index_format="bitmap")
    if recomputes:
        recompute(model)
    training = Training(model, CPU, 1)
    scratch.clear()
    places = (t for one in layouts(model).values() for t in one.tensors.values())
    with Living([*model.parameters(), *places]) as living:
        for _ in range(2):
            training.step()
    return living.peak + scratch.nbytes  # which a dispatch mode does not see


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tiny", action="store_true", help="a small model")
    options = arguments.parse_args()
    shape = TINY[0] if options.tiny else SHAPES[0]
    layout.TILE_ENTRIES["cpu"] = layout.TILE_ENTRIES["cuda"]
    print("| model | recompute | pruned | a block | peak | dense / this |")
    print("| --- | --- | --: | --: | --: | --: |")
    for recomputes in (True, False):
        dense = 0.0
        for ratio in (0.0, 0.8, 0.9):
            one, two = (peak(replace(shape, depth=depth), ratio, recomputes) for depth in (1, 2))
            whole = one + (shape.depth - 1) * (two - one)
            dense = dense or whole
            print(
                f"| {shape.name} | {'yes' if recomputes else 'no'} | {ratio:.0%} "
                f"| {(two - one) / 1e6:.3g} MB | {whole / 1e9:.3g} GB | {dense / whole:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
