"""Measures a pruned transformer block's passes and step against the dense block's.

    python -m benchmarks.overhead.step

Tokens are in sequences of 512 at most. With ``--threads 2`` times are those of the clock. Shares
are of the faster dense block: with torch's own products and attention, or with those that a run
takes on AMD's processors with AVX-512. The pruned ones take what a run does. Prints a Markdown
table. ``--precision bf16-mixed`` runs under autocast, ``--compute`` chooses the pruned block's
products.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import Block
from lightning_axosparse.sparse.backend import COMPUTES, Compute
from lightning_axosparse.support.dense_products import onednn_is_faster, without_mkl

SEQUENCE = 512


def pruned(block: nn.Module, ratio: float, compute: Compute) -> nn.Module:
    block = copy.deepcopy(block)
    shapes = {name: p.shape for name, p in block.named_parameters() if p.dim() > 1}
    masks = {name: torch.rand(shape) > ratio for name, shape in shapes.items()}
    sparsify(block, masks, compute=compute)
    return block


def run_in(products: Callable[[], AbstractContextManager[None]], run: Callable[[], None]) -> None:
    with products():
        run()


def forward_backward(block: nn.Module, inputs: Tensor, mixed: bool) -> Callable[[], None]:
    def run() -> None:
        block.zero_grad()
        inputs.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            output = block(inputs)
        output.float().sum().backward()

    return run


def whole_step(block: nn.Module, inputs: Tensor, mixed: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(block.parameters(), 1e-4)
    backward = forward_backward(block, inputs, mixed)

    def run() -> None:
        backward()
        optimizer.step()

    return run


def rows(width: int, tokens: int, options: argparse.Namespace) -> Iterator[str]:
    torch.manual_seed(0)
    dense = Block(width, heads=max(1, width // 64), dropout=0.0)
    faster = onednn_is_faster(p.shape for p in dense.parameters())
    chosen = without_mkl if faster else nullcontext
    blocks = {"torch": dense, "oneDNN": copy.deepcopy(dense)}
    products = {"torch": nullcontext, "oneDNN": without_mkl}
    for ratio in options.ratios:
        blocks[f"{ratio:.0%}"] = pruned(dense, ratio, options.compute)
    length = min(tokens, SEQUENCE)
    mixed = options.precision == "bf16-mixed"
    inputs = torch.randn(tokens // length, length, width, requires_grad=True)
    for name, kind in (("forward + backward", forward_backward), ("AdamW step", whole_step)):
        runners = {
            key: partial(run_in, products.get(key, chosen), kind(block, inputs, mixed))
            for key, block in blocks.items()
        }
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        seconds = median_seconds(runners, options.trials, clock)
        fastest = min(seconds["torch"], seconds["oneDNN"])
        found = [f"{seconds[key] * 1e3:.0f} ms" for key in ("torch", "oneDNN")]
        found += [f"{seconds[key] / fastest:.2f}" for key in list(blocks)[2:]]
        yield f"| {width} | {tokens} | {name} | {' | '.join(found)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[192, 1024, 2048])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 2048])
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8, 0.9, 0.95])
    arguments.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    arguments.add_argument("--compute", choices=COMPUTES, default="auto")
    arguments.add_argument("--trials", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    ratios = " | ".join(f"{ratio:.0%}" for ratio in options.ratios)
    print(f"| width | tokens | what | dense, torch | dense, oneDNN | {ratios} |")
    print(f"| --: | --: | --- | --: | --: {'| --: ' * len(options.ratios)}|")
    for width in options.widths:
        for tokens in options.tokens:
            for row in rows(width, tokens, options):
                print(row, flush=True)


if __name__ == "__main__":
    main()
