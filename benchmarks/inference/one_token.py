"""Measures the products of one token: with a dense weight, on panels, and on unpruned values.

    python -m benchmarks.inference.one_token

Weights are read from memory, as when a model decodes: each trial takes the next of several, which
are larger than the caches together. One thread, random masks; times of the thread's
processor. ``Linear`` multiplies by the transposed weight, ``Conv1D`` of transformers by the weight.
Prints a Markdown table: the dense product, and the ratios to it of the two others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse.sparse.ops import panels
from lightning_axosparse.sparse.ops import products as kept_products
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout

READ = 2**28
"""Bytes of all dense weights that trials take in turn."""

Kept = tuple[Tensor, Layout]


def runner(
    product: Callable[..., Any], inputs: Tensor, weights: Sequence[Any]
) -> Callable[[], None]:
    """Multiply with the next weight at each call."""
    turns = cycle(weights)
    return lambda: product(inputs, *next(turns))


def row(height: int, width: int, ratio: float, dtype: torch.dtype, trials: int) -> str:
    torch.manual_seed(0)
    number = READ // (dtype.itemsize * height * width)
    dense = [(torch.randn(height, width).to(dtype),) for _ in range(number)]
    layouts = [layout_of(torch.rand(height, width) > ratio, "segments") for _ in range(number)]
    kept = [(torch.randn(layout.nnz).to(dtype), layout) for layout in layouts]
    cells = []
    for name, product, size in (
        ("spmm_t", F.linear, width),
        ("spmm", torch.matmul, height),
    ):
        inputs = torch.randn(1, size).to(dtype)
        runners = {
            "dense": runner(product, inputs, dense),
            "panels": runner(getattr(panels, name), inputs, kept),
            "kept": runner(getattr(kept_products, name), inputs, kept),
        }
        seconds = median_seconds(runners, trials)
        shares = " / ".join(f"{seconds[way] / seconds['dense']:.2f}" for way in ("panels", "kept"))
        cells.append(f"{seconds['dense'] * 1e3:.2f} ms | {shares}")
    return f"| {height} x {width} | {ratio:.0%} | {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    sizes = ["1024x1024", "4096x1024", "1024x4096"]
    arguments.add_argument("--sizes", nargs="+", default=sizes, help="rows x columns of a weight")
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--trials", type=int, default=99)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| weight | pruned | Linear: dense | panels / unpruned | Conv1D: dense | panels / kept |")
    print("| --- | --: | --: | --: | --: | --: |")
    for size in options.sizes:
        height, width = map(int, size.split("x"))
        for ratio in options.ratios:
            print(
                row(height, width, ratio, getattr(torch, options.dtype), options.trials), flush=True
            )


if __name__ == "__main__":
    main()
