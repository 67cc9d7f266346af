"""Measures a prototype of a product with weights that are pruned in blocks of 4x1.

    python -m benchmarks.overhead.blocks [--trials 7]

Four rows of a column are pruned together, so vectors of 16 tokens are loaded once for four
products. The prototype computes ``x W^T`` without the time to pack inputs and outputs, which the
product with single entries includes; it is compared with that and with a dense one, on one thread,
by processor time. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse.sparse.kernels import SEGMENT
from lightning_axosparse.sparse.ops import products
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.support.vectors import (
    broadcast,
    compiled,
    item,
    load,
    multiply_add,
    store,
    zeros,
)

LANES, ROWS = 16, 4


@compiled
def blocked(packed: Any, tokens: int, counts: Any, offsets: Any, values: Any, outputs: Any) -> None:
    """Compute groups of 16 tokens, one after the other, of all outputs, four at a time."""
    zero = zeros(16)
    width, height = len(packed) // tokens, len(outputs) // tokens
    segments = width // SEGMENT
    for group in range(0, tokens, LANES):
        entry = 0
        for block in range(height // ROWS):
            first, second, third, fourth = zero, zero, zero, zero
            for segment in range(segments):
                number = item(counts, block * segments + segment)
                start = group * width + segment * SEGMENT * LANES
                for k in range(entry, entry + number):
                    inputs = load(zero, packed, start + item(offsets, k) * LANES)
                    first = multiply_add(broadcast(zero, item(values, 4 * k)), inputs, first)
                    second = multiply_add(broadcast(zero, item(values, 4 * k + 1)), inputs, second)
                    third = multiply_add(broadcast(zero, item(values, 4 * k + 2)), inputs, third)
                    fourth = multiply_add(broadcast(zero, item(values, 4 * k + 3)), inputs, fourth)
                entry += number
            place = group * height + block * ROWS * LANES
            store(first, outputs, place)
            store(second, outputs, place + LANES)
            store(third, outputs, place + 2 * LANES)
            store(fourth, outputs, place + 3 * LANES)


def prototype(inputs: Any, dense: Any, mask: Any) -> tuple[Any, ...]:
    """Return the arguments of :func:`blocked` for a mask of blocks, once its result was checked."""
    (tokens, width), height = inputs.shape, dense.shape[0]
    packed = inputs.reshape(-1, LANES, width).transpose(0, 2, 1).ravel()
    counts = mask.reshape(len(mask), -1, SEGMENT).sum(2).astype(np.int16).ravel()
    offsets = (np.nonzero(mask)[1] % SEGMENT).astype(np.uint8)
    values = dense.reshape(-1, ROWS, width).transpose(0, 2, 1)[mask].ravel()
    outputs = np.zeros(tokens * height, np.float32)
    arguments = packed, tokens, counts, offsets, values, outputs
    blocked(*arguments)
    found = outputs.reshape(-1, height, LANES).transpose(0, 2, 1).reshape(tokens, height)
    np.testing.assert_allclose(found, inputs @ (dense * mask.repeat(ROWS, 0)).T, atol=1e-3)
    return arguments


def row(height: int, width: int, tokens: int, ratio: float, trials: int) -> str:
    torch.manual_seed(0)
    inputs, dense = torch.randn(tokens, width), torch.randn(height, width)
    layout = layout_of(torch.rand(height, width) > ratio, "segments")
    blocks = torch.rand(height // ROWS, width) > ratio
    runners = {
        "dense": partial(F.linear, inputs, dense),
        "single": partial(products.spmm_t, inputs, layout.compress(dense), layout),
        "blocks": partial(blocked, *prototype(inputs.numpy(), dense.numpy(), blocks.numpy())),
    }
    seconds = median_seconds(runners, trials)
    whole = seconds["dense"]
    shares = " | ".join(f"{seconds[name] / whole:.2f}" for name in ("single", "blocks"))
    return f"| {height} x {width} | {tokens} | {ratio:.0%} | {whole * 1e3:.1f} ms | {shares} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| weight | tokens | pruned | dense | single entries | blocks of 4x1 |")
    print("| --- | --: | --: | --: | --: | --: |")
    for height, width in ((1024, 1024), (4096, 1024), (1024, 4096)):
        for ratio in (0.8, 0.9):
            print(row(height, width, 256, ratio, options.trials), flush=True)


if __name__ == "__main__":
    main()
