"""Measures the time that pruned weights, without and with a dense copy, add to a step.

    python -m benchmarks.overhead.dense_copy

A transformer block, 90 % pruned, one thread: the forward and backward passes of some micro-batches
and a step of plain SGD, after which the dense copy of ``compute="samo"`` is filled again. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import Block
from lightning_axosparse.sparse.backend import Compute

SEQUENCE = 512


def block(width: int, ratio: float, compute: Compute | None) -> nn.Module:
    torch.manual_seed(0)
    made = Block(width, heads=max(1, width // 64), dropout=0.0)
    if compute is not None:
        shapes = {name: p.shape for name, p in made.named_parameters() if p.dim() > 1}
        masks = {name: torch.rand(shape) > ratio for name, shape in shapes.items()}
        sparsify(made, masks, compute=compute)
    return made


def step(
    module: nn.Module, width: int, tokens: int, passes: int, mixed: bool
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), 1e-4)
    length = min(tokens, SEQUENCE)
    inputs = torch.randn(tokens // length, length, width, requires_grad=True)

    def run() -> None:
        optimizer.zero_grad()
        inputs.grad = None
        for _ in range(passes):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                output = module(inputs)
            output.float().sum().backward()
        optimizer.step()

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--precision", nargs="+", default=["32-true", "bf16-mixed"])
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    arguments.add_argument("--passes", type=int, nargs="+", default=[1, 4])
    arguments.add_argument("--ratio", type=float, default=0.9)
    arguments.add_argument("--trials", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| precision | tokens | micro-batches a step | dense | auto | samo |")
    print("| --- | --: | --: | --: | --: | --: |")
    for precision in options.precision:
        for tokens in options.tokens:
            for passes in options.passes:
                mixed = precision == "bf16-mixed"
                ways: dict[str, Compute | None] = {"dense": None, "auto": "auto", "samo": "samo"}
                runners = {
                    way: step(
                        block(options.width, options.ratio, compute),
                        options.width,
                        tokens,
                        passes,
                        mixed,
                    )
                    for way, compute in ways.items()
                }
                seconds = median_seconds(runners, options.trials)
                more = (f"{seconds[p] / seconds['dense'] - 1:+.1%}" for p in ("auto", "samo"))
                dense = f"{seconds['dense'] * 1e3:.0f} ms"
                print(f"| {precision} | {tokens} | {passes} | {dense} | {' | '.join(more)} |")


if __name__ == "__main__":
    main()
