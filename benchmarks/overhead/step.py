"""Measures the time that sparse storage adds to a transformer block's passes and step.

    python -m benchmarks.overhead.step

One thread, float32, 90 % pruned; tokens are in sequences of 512. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import Block

SEQUENCE = 512


def pruned(block: nn.Module, ratio: float) -> nn.Module:
    block = copy.deepcopy(block)
    shapes = {name: p.shape for name, p in block.named_parameters() if p.dim() > 1}
    sparsify(block, {name: torch.rand(shape) > ratio for name, shape in shapes.items()})
    return block


def forward_backward(block: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def run() -> None:
        block.zero_grad()
        inputs.grad = None
        block(inputs).sum().backward()

    return run


def whole_step(block: nn.Module, inputs: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(block.parameters(), 1e-4)
    backward = forward_backward(block, inputs)

    def run() -> None:
        backward()
        optimizer.step()

    return run


def row(width: int, tokens: int, ratio: float, trials: int) -> str:
    torch.manual_seed(0)
    dense = Block(width, heads=max(1, width // 64), dropout=0.0)
    sparse = pruned(dense, ratio)
    length = min(tokens, SEQUENCE)
    inputs = torch.randn(tokens // length, length, width, requires_grad=True)
    overheads = []
    for kind in (forward_backward, whole_step):
        seconds = median_seconds(
            {"dense": kind(dense, inputs), "sparse": kind(sparse, inputs)}, trials
        )
        overheads.append((seconds["dense"], seconds["sparse"] / seconds["dense"] - 1))
    cells = " | ".join(f"{dense * 1e3:.0f} ms | {more:+.1%}" for dense, more in overheads)
    return f"| {width} | {tokens} | {cells} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[1024, 2048])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    arguments.add_argument("--ratio", type=float, default=0.9)
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| width | tokens | forward + backward, dense | sparse | AdamW step, dense | sparse |")
    print("| --: | --: | --: | --: | --: | --: |")
    for width in options.widths:
        for tokens in options.tokens:
            print(row(width, tokens, options.ratio, options.trials), flush=True)


if __name__ == "__main__":
    main()
