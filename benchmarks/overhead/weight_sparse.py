"""Measures GPTs of which one weight in 50 to 1000 is left, and dense ones as wide or as small.

    python -m benchmarks.overhead.weight_sparse

Masks are random, with the same density in each weight; embeddings and the head are pruned, too. A
training step has 8 sequences of 64 tokens, forward and backward passes and AdamW; a token is
generated for one sequence, after a prompt of 16. Times are the thread's processor time. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.inference.models import pruned
from benchmarks.overhead.interleaved import median_seconds
from benchmarks.perplexity.job import bytes_of_state
from lightning_axosparse.examples.gpt import GPT

DEPTH, CONTEXT, PROMPT, GENERATED = 2, 64, 16, 32


def gpt(width: int) -> GPT:
    heads = width // 64 if width % 64 == 0 else 1
    return GPT(width=width, depth=DEPTH, heads=heads, context=CONTEXT)


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.dim() > 1)


def as_small(left: int) -> GPT:
    """Return the widest dense GPT with at most so many weights."""
    with torch.device("meta"):
        widths = itertools.takewhile(lambda width: weights(gpt(width)) <= left, itertools.count(1))
        width = max(widths)
    return gpt(width)


def training_step(model: GPT) -> Callable[[], None]:
    tokens = torch.randint(256, (8, CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def run() -> None:
        model.loss((tokens, tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def generation(model: GPT) -> Callable[[], None]:
    prompt = torch.randint(256, (1, PROMPT))
    return lambda: model.generate_tokens(prompt, GENERATED, temperature=0)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[512, 2048])
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.98, 0.99, 0.999])
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| network | weights left | state, MB | step, ms | tokens generated a second |")
    print("| --- | --: | --: | --: | --: |")
    for width in options.widths:
        torch.manual_seed(0)
        dense = gpt(width)
        models = {f"{width} wide, dense": dense}
        left = {f"{width} wide, dense": weights(dense)}
        for ratio in options.ratios:
            remaining = round((1 - ratio) * weights(dense))
            small = as_small(remaining)
            names = f"{width} wide, {ratio:.1%} pruned", f"{small.hparams['width']} wide, dense"
            models |= dict(zip(names, (pruned(dense, ratio), small), strict=True))
            left |= dict(zip(names, (remaining, weights(small)), strict=True))
        steps = median_seconds({n: training_step(m) for n, m in models.items()}, options.trials)
        tokens = median_seconds({n: generation(m) for n, m in models.items()}, options.trials)
        for name, model in models.items():
            megabytes = bytes_of_state(model, None) / 1e6
            times = f"{steps[name] * 1e3:.1f} | {GENERATED / tokens[name]:.0f}"
            print(f"| {name} | {left[name]:,} | {megabytes:.1f} | {times} |", flush=True)


if __name__ == "__main__":
    main()
