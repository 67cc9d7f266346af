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

from benchmarks.overhead.products import products
from lightning_axosparse.support.dense_products import onednn_is_faster, without_mkl


def least_seconds(run: Callable[[], Any], trials: int) -> float:
    run()
    times = []
    for _ in range(trials):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def row(width: int, tokens: int, ratios: Sequence[float], trials: int) -> str:
    shares = []
    for ratio in ratios:
        ways = products(width, tokens, ratio, torch.float32).values()
        dense, unpruned = (
            sum(least_seconds(runners[way], trials) for runners in ways)
            for way in ("dense", "kept")
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
