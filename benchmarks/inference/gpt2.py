"""Measures how many tokens a second a pruned GPT-2 of transformers generates.

    python -m benchmarks.inference.gpt2 [--batch 1 8] [--ratio 0.9]

Weights and masks are random. The dense model runs with torch's own products and with oneDNN's, and
ratios are to the faster one; pruned models run as ``generate`` runs them, without oneDNN. Every
sequence begins with one token, and keys and values are cached. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.interleave import trials
from lightning_axosparse import sparsify
from lightning_axosparse.support.dense_products import without_mkl


def pruned(dense: nn.Module, ratio: float, *names: str) -> nn.Module:
    """Return a copy in which the matrices are sparse whose names contain one of ``names``."""
    model = copy.deepcopy(dense)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    chosen = {name: p for name, p in matrices.items() if any(part in name for part in names)}
    sparsify(model, {name: torch.rand(p.shape) > ratio for name, p in chosen.items()})
    return model


def generate(
    model: nn.Module,
    prompts: torch.Tensor,
    tokens: int,
    products: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[int], None]:
    def run(trial: int) -> None:
        with products():
            model.generate(  # type: ignore[operator]
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=768)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--ratio", type=float, default=0.9)
    arguments.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--tokens", type=int, default=17, help="of each sequence")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dense = GPT2LMHeadModel(GPT2Config(n_embd=options.width, n_layer=options.layers)).eval()
    blocks = pruned(dense, options.ratio, ".h.")
    whole = pruned(dense, options.ratio, ".h.", "wte.weight")
    print("| batch | pruned | tokens a second | this / dense |")
    print("| --: | --- | --: | --: |")
    for batch in options.batch:
        prompts = torch.randint(dense.config.vocab_size, (batch, 1))
        runners = {
            "nothing, torch": generate(dense, prompts, options.tokens),
            "nothing, oneDNN": generate(dense, prompts, options.tokens, without_mkl),
            "blocks": generate(blocks, prompts, options.tokens),
            "blocks, embedding and head": generate(whole, prompts, options.tokens),
        }
        seconds = trials(runners, options.trials)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        fastest = min(medians["nothing, torch"], medians["nothing, oneDNN"])
        for name, median in medians.items():
            rate = batch * options.tokens / median
            print(f"| {batch} | {name} | {rate:.1f} | {fastest / median:.2f} |", flush=True)


if __name__ == "__main__":
    main()
