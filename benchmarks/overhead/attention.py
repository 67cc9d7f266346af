"""Measures attention in the loops of a run against torch's kernel.

    python -m benchmarks.overhead.attention

Forward and backward passes in float32, heads of 64; trials are interleaved, times are the thread's.
Prints a Markdown table: torch's time, and the share of it that the loops take.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse.support.dense_products import without_mkl

SIZE = 64


def passes(heads: int, tokens: int, causal: bool) -> Callable[[], None]:
    shape = 1, tokens, 3, heads, SIZE
    inputs = torch.randn(shape, requires_grad=True)
    gradient = torch.randn(1, tokens, heads, SIZE).transpose(1, 2)

    def run() -> None:
        query, key, value = inputs.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        attended.backward(gradient)

    return run


def run_in(kernel: Callable[[], AbstractContextManager[None]], run: Callable[[], None]) -> None:
    with kernel():
        run()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    arguments.add_argument("--heads", type=int, default=16)
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| tokens | causal: torch | loops | all keys: torch | loops |")
    print("| --: | --: | --: | --: | --: |")
    for tokens in options.tokens:
        cells = []
        for causal in (True, False):
            run = passes(options.heads, tokens, causal)
            kernels = {"torch": nullcontext, "loops": without_mkl}
            runners = {name: partial(run_in, kernel, run) for name, kernel in kernels.items()}
            seconds = median_seconds(runners, options.trials)
            share = seconds["loops"] / seconds["torch"]
            cells.append(f"{seconds['torch'] * 1e3:.1f} ms | {share:.2f}")
        print(f"| {tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
