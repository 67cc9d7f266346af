"""Measures the three products of a linear layer, on unpruned values and on panels, against dense.

    python -m benchmarks.overhead.products

One thread, random masks; a layer has 4 x width outputs. Prints a Markdown table: the time of the
dense product, and the ratios to it of the two ways to multiply by a sparse weight, between which
``sparse/ops/products.py`` chooses by this table. ``--dtype bfloat16`` compares with products in
bfloat16; unpruned values multiply in float32 there, too. ``--csr`` adds torch's products with CSR
matrices, which MKL computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse.sparse.ops import panels
from lightning_axosparse.sparse.ops import products as kept_products
from lightning_axosparse.sparse.store.formats import layout_of

Runners = Mapping[str, Callable[[], Any]]


def products(
    width: int, tokens: int, ratio: float, dtype: torch.dtype, csr: bool = False
) -> dict[str, Runners]:
    height = 4 * width
    mask = torch.rand(height, width) > ratio
    weight = (torch.randn(height, width) * mask).to(dtype)
    layout = layout_of(mask, "segments")
    values = layout.compress(weight)
    inputs, gradient = torch.randn(tokens, width).to(dtype), torch.randn(tokens, height).to(dtype)

    def runners(name: str, dense: Callable[[], Tensor], *operands: Tensor) -> Runners:
        cast = (dtype,) if name == "sddmm" else ()
        return {
            "dense": dense,
            "panels": partial(getattr(panels, name), *operands, layout, *cast),
            "kept": partial(getattr(kept_products, name), *operands, layout),
        }

    found = {
        "x W^T": runners("spmm_t", lambda: F.linear(inputs, weight), inputs, values),
        "g W": runners("spmm", lambda: gradient @ weight, gradient, values),
        "g^T x": runners("sddmm", lambda: gradient.t() @ inputs, gradient, inputs),
    }
    if not csr:
        return found
    stored, transposed = weight.to_sparse_csr(), weight.t().to_sparse_csr()
    others = {
        "x W^T": lambda: stored @ inputs.t(),
        "g W": lambda: transposed @ gradient.t(),
        "g^T x": lambda: torch.sparse.sampled_addmm(stored, gradient.t(), inputs, beta=0),
    }
    return {name: {**ways, "CSR": others[name]} for name, ways in found.items()}


def row(
    width: int, tokens: int, ratio: float, dtype: torch.dtype, trials: int, csr: bool = False
) -> str:
    torch.manual_seed(0)
    cells = []
    for runners in products(width, tokens, ratio, dtype, csr).values():
        seconds = median_seconds(runners, trials)
        dense = seconds.pop("dense")
        shares = " / ".join(f"{each / dense:.2f}" for each in seconds.values())
        cells.append(f"{dense * 1e3:.2f} ms | {shares}")
    return f"| {width} | {tokens} | {100 * ratio:.3g}% | {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[64, 192, 1024, 2048])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 512, 2048])
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9, 0.95])
    arguments.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    arguments.add_argument("--trials", type=int, default=9)
    arguments.add_argument("--csr", action="store_true", help="also by CSR")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    ways = "panels / unpruned" + " / CSR" * options.csr
    products_ = " | ".join(f"{name}: dense | {ways}" for name in ("x W^T", "g W", "g^T x"))
    print(f"| width | tokens | pruned | {products_} |")
    print("| --: | --: | --: " + 3 * "| --: | --: " + "|")
    for width in options.widths:
        for tokens in options.tokens:
            for ratio in options.ratios:
                dtype = getattr(torch, options.dtype)
                print(row(width, tokens, ratio, dtype, options.trials, options.csr), flush=True)


if __name__ == "__main__":
    main()
