"""Measures how many tokens a second a GPT decodes: pruned, dense in two precisions, and in int8.

    python -m benchmarks.inference [--batch 1 4 16] [--threads 2]

Every model continues the same prompts of one token, greedily, with its keys and values cached.
"int8" is torch's dynamic quantization of all linear layers. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.inference.models import VOCABULARY, models, stored_bytes
from benchmarks.interleave import ratios, trials
from lightning_axosparse.examples.gpt import GPT

BASELINES = ("float32", "bfloat16", "int8")


def decode(model: GPT, prompts: Tensor, tokens: int) -> Callable[[int], None]:
    def run(trial: int) -> None:
        model.generate_tokens(prompts, tokens, temperature=0)

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--layers", type=int, default=20)
    arguments.add_argument("--batch", type=int, nargs="+", default=[1])
    arguments.add_argument("--tokens", type=int, default=32, help="of each sequence")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    compared = models(options.width, options.layers)
    print("| batch | weights | stored | tokens a second ", end="")
    print("".join(f"| this / {name} " for name in BASELINES) + "|")
    print("| --: | --- | --: | --: " + "| --: " * len(BASELINES) + "|")
    for batch in options.batch:
        prompts = torch.randint(VOCABULARY, (batch, 1))
        runners = {name: decode(each, prompts, options.tokens) for name, each in compared.items()}
        seconds = trials(runners, options.trials)
        shares = [ratios(seconds, name) for name in BASELINES]
        for name, model in compared.items():
            rate = batch * options.tokens / statistics.median(seconds[name])
            speedups = " | ".join(f"{1 / share[name]:.2f}" for share in shares)
            stored = f"{stored_bytes(model) / 1e6:.0f} MB"
            print(f"| {batch} | {name} | {stored} | {rate:.1f} | {speedups} |", flush=True)


if __name__ == "__main__":
    main()
