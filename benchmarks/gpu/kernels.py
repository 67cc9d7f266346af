"""Checks and times the kernels of every index format on one GPU.

    python -m benchmarks.gpu.kernels              # on a CUDA device
    python -m benchmarks.gpu.kernels --tiny       # on CPU: does it all work?

Before any timing, every kernel is compared with the reference, to the bit. Then prints a Markdown
table: one weight made dense and compressed again, next to filling the same memory with zeros, which
is the lower bound for making it dense.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.timing import median_seconds
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.store.formats import FORMATS, layout_of
from lightning_axosparse.sparse.store.layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(device: torch.device) -> None:
    """Check that every format's kernel computes what the reference does, between all dtypes."""
    for name in FORMATS:
        for kept in (0.0, 0.002, 0.1, 1.0):
            mask = torch.rand(301, 1000, device=device) < kept
            mask[40:90] = False
            layout = layout_of(mask, name)
            for stored, dtype in product(DTYPES, DTYPES):
                _check_one(layout, torch.randn(mask.shape, device=device).to(dtype), stored)


def _check_one(layout: Layout, dense: Tensor, stored: torch.dtype) -> None:
    values = layout.compress(dense)
    assert torch.equal(values, dense.flatten()[layout.positions().long()]), layout
    for tile in layout.tiles:
        part, place = values[tile.entries].to(stored), layout.positions_in(tile)
        made, expected = (torch.full_like(dense.view(-1), 7)[: tile.numel] for _ in range(2))
        layout.densify_tile(tile, part, made)
        reference.densify(place, part, expected)
        assert torch.equal(made, expected), layout
        read, expected = torch.empty_like(part), torch.empty_like(part)
        flat = dense.view(-1)[tile.start : tile.start + tile.numel]
        layout.compress_tile(tile, flat, read)
        reference.compress(place, flat, expected)
        assert torch.equal(read, expected), layout


def rows(
    size: int, dtype: torch.dtype, ratio: float, device: torch.device, trials: int
) -> list[str]:
    """Return the rows of the table for one weight."""
    dense = torch.randn(size, size, device=device).to(dtype)
    mask = torch.rand(size, size, device=device) >= ratio
    layouts = {name: layout_of(mask, name) for name in FORMATS}
    values = layouts["bitmap"].compress(dense)
    made = torch.empty_like(dense)
    time = partial(median_seconds, trials=trials, device=device, repeats=10)
    zeros = time({"zeros": made.zero_})["zeros"]
    writing = time({name: partial(one.fill, made, values) for name, one in layouts.items()})
    reading = time({name: partial(one.compress, dense) for name, one in layouts.items()})
    return [
        f"| {str(dtype)[6:]} | {ratio:.0%} | {name} | {layout.nbytes / max(layout.nnz, 1):.2f} "
        f"| {zeros * 1e6:.0f} us | {writing[name] * 1e6:.0f} us | {writing[name] / zeros:.2f} "
        f"| {reading[name] * 1e6:.0f} us | {reading[name] / zeros:.2f} |"
        for name, layout in layouts.items()
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tiny", action="store_true", help="a small weight on CPU")
    arguments.add_argument("--size", type=int, default=8192, help="rows and columns of the weight")
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("No CUDA device here: run with --tiny to try the script on CPU.")
    device = torch.device("cpu" if options.tiny else "cuda")
    torch.manual_seed(0)
    check(device)
    print(
        "| dtype | pruned | format | bytes per unpruned entry | zeros | densify | / zeros ", end=""
    )
    print("| compress | / zeros |\n| --- | --: | --- | --: | --: | --: | --: | --: | --: |")
    for dtype in DTYPES[:2]:
        for ratio in (0.8, 0.9):
            size = 64 if options.tiny else options.size
            print(*rows(size, dtype, ratio, device, options.trials), sep="\n", flush=True)


if __name__ == "__main__":
    main()
