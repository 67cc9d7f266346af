"""Measures time and bytes of each index format.

    python -m benchmarks.overhead.formats

One float32 weight with random masks, one thread: all its tiles are made dense in scratch memory and
compressed again. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse.sparse.store.formats import FORMATS, layout_of
from lightning_axosparse.sparse.store.layout import Layout


def densify(layout: Layout, values: Tensor, tile: Tensor) -> Callable[[], None]:
    def run() -> None:
        for part in layout.tiles:
            layout.densify_tile(part, values[part.entries], tile[: part.numel])

    return run


def compress(layout: Layout, values: Tensor, tile: Tensor) -> Callable[[], None]:
    def run() -> None:
        for part in layout.tiles:
            layout.compress_tile(part, tile[: part.numel], values[part.entries])

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--size", type=int, default=4096)
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| pruned | format | bytes per unpruned entry | densify | compress |")
    print("| --: | --- | --: | --: | --: |")
    for ratio in (0.5, 0.8, 0.9, 0.95):
        mask = torch.rand(options.size, options.size) > ratio
        layouts = {name: layout_of(mask, name) for name in FORMATS}
        first = layouts["segments"]
        values = torch.randn(first.nnz)
        tile = torch.empty(max(part.numel for part in first.tiles))
        made, read = (
            median_seconds(
                {name: kind(one, values, tile) for name, one in layouts.items()}, options.trials
            )
            for kind in (densify, compress)
        )
        for name, layout in layouts.items():
            print(
                f"| {ratio:.0%} | {name} | {layout.nbytes / layout.nnz:.2f} "
                f"| {made[name] * 1e3:.2f} ms | {read[name] * 1e3:.2f} ms |",
                flush=True,
            )


if __name__ == "__main__":
    main()
