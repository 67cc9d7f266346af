"""Measures the three products of dense linear layers by oneDNN against torch's own.

    python -m benchmarks.overhead.dense_products

float32, one thread. Prints a Markdown table: torch's time, and the share of it that oneDNN takes,
also for products that ``support/dense_products.py`` leaves to torch by this table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse.support.torch_internals import onednn_product

Runners = Mapping[str, Callable[[], Tensor]]


def products(width: int, outputs: int, tokens: int) -> list[Runners]:
    x, gradient = torch.randn(tokens, width), torch.randn(tokens, outputs)
    weight, bias = torch.randn(outputs, width), torch.randn(outputs)
    return [
        {
            "torch": lambda: F.linear(x, weight, bias),
            "oneDNN": lambda: onednn_product(x, weight.t(), bias),
        },
        {
            "torch": lambda: gradient @ weight,
            "oneDNN": lambda: onednn_product(gradient, weight),
        },
        {
            "torch": lambda: gradient.t() @ x,
            "oneDNN": lambda: onednn_product(gradient.t(), x),
        },
    ]


def row(width: int, outputs: int, tokens: int, trials: int) -> str:
    torch.manual_seed(0)
    cells = []
    for runners in products(width, outputs, tokens):
        torch.testing.assert_close(runners["torch"](), runners["oneDNN"](), rtol=1e-4, atol=1e-3)
        seconds = median_seconds(runners, trials)
        cells.append(
            f"{seconds['torch'] * 1e3:.2f} ms | {seconds['oneDNN'] / seconds['torch']:.2f}"
        )
    return f"| {width} | {outputs} | {tokens} | {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024, 2048])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048])
    arguments.add_argument("--trials", type=int, default=15)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    names = " | ".join(f"{name}, torch | oneDNN" for name in ("x W^T + b", "g W", "g^T x"))
    print(f"| width | outputs | tokens | {names} |")
    print("| --: | --: | --: " + 3 * "| --: | --: " + "|")
    for width in options.widths:
        for outputs in (width, 4 * width):
            for tokens in options.tokens:
                print(row(width, outputs, tokens, options.trials), flush=True)


if __name__ == "__main__":
    main()
