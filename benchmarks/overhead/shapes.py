"""Measures the three products of layers of many shapes on unpruned values, together.

    python -m benchmarks.overhead.shapes

One thread, random masks; a layer has 4 x width outputs. Times are the best of some calls, against
those of the dense products that a run takes (by oneDNN on AMD's processors with AVX-512). Prints a
Markdown table: the time of the dense products, and the share of it at each ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from lightning_axosparse.sparse.ops import products
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.support.dense_products import onednn_is_faster, without_mkl


def seconds(runs: Sequence[Callable[[], Any]], trials: int) -> float:
    """Return the sum of the least seconds of each."""
    total = 0.0
    for run in runs:
        run()
        times = []
        for _ in range(trials):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        total += min(times)
    return total


def row(width: int, tokens: int, ratios: Sequence[float], trials: int) -> str:
    height = 4 * width
    weight = torch.randn(height, width)
    inputs, gradient = torch.randn(tokens, width), torch.randn(tokens, height)
    dense = seconds(
        (
            lambda: F.linear(inputs, weight),
            lambda: gradient @ weight,
            lambda: gradient.t() @ inputs,
        ),
        trials,
    )
    shares = []
    for ratio in ratios:
        layout: Any = layout_of(torch.rand(height, width) > ratio, "segments")
        values = layout.compress(weight)
        unpruned = seconds(
            (
                lambda: products.spmm_t(inputs, values, layout),  # noqa: B023
                lambda: products.spmm(gradient, values, layout),  # noqa: B023
                lambda: products.sddmm(gradient, inputs, layout),  # noqa: B023
            ),
            trials,
        )
        shares.append(f"{unpruned / dense:.2f}")
    return f"| {width} | {tokens} | {dense * 1e3:.0f} ms | {' | '.join(shares)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.8, 0.9, 0.95, 0.98])
    arguments.add_argument("--trials", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(f"| width | tokens | dense | {' | '.join(f'{ratio:.0%}' for ratio in options.ratios)} |")
    print(f"| --: | --: | --: {'| --: ' * len(options.ratios)}|")
    faster = onednn_is_faster([torch.Size((width, width)) for width in options.widths])
    with without_mkl() if faster else nullcontext():
        for width in options.widths:
            for tokens in options.tokens:
                print(row(width, tokens, options.ratios, options.trials), flush=True)


if __name__ == "__main__":
    main()
