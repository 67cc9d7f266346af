"""Measures what rounding the weights to eight bits costs in perplexity.

    python -m benchmarks.inference.rounding [--seeds 3 4 5]

The networks are those of ``benchmarks/perplexity``: trained from scratch, twenty tokens per
parameter, dense and pruned gradually at the rates that were best there. Each is evaluated on the
test text with float32 values and with int8 ones; "dense" is rounded by torch's dynamic
quantization. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.inference.models import quantized
from benchmarks.perplexity.arms import Arm
from benchmarks.perplexity.tasks import LIBRARY
from benchmarks.perplexity.training import Training
from lightning_axosparse import Ticket, load_sparse
from lightning_axosparse.examples.gpt import GPT

GRADUAL = {"method": "gradual", "begin": 0.25, "end": 0.9, "score": "curvature"}
ARMS = {
    "dense": Arm(rate=0.006),
    "80%": Arm(rate=0.006, ratio=0.8, **GRADUAL),  # type: ignore[arg-type]
    "90%": Arm(rate=0.009, ratio=0.9, **GRADUAL),  # type: ignore[arg-type]
}


def trained(arm: Arm, seed: int) -> Training:
    training = Training(LIBRARY, arm, seed, LIBRARY.texts(None))
    while training.step < LIBRARY.all_steps:
        training.advance()
    training.perplexity(training.texts.validation)  # leaves the unpruned entries alone
    return training


def rounded(training: Training) -> GPT:
    masks = training.pruner.masks
    if masks is None:
        return quantized(training.model)
    model = copy.deepcopy(training.model)
    ticket = Ticket(dict(masks), training.arm.ratio)
    load_sparse(model, training.model.state_dict(), ticket, dtype=torch.int8)
    return model


@torch.inference_mode()
def perplexity(model: GPT, training: Training) -> float:
    model.eval()
    losses: list[Tensor] = []
    windows = training.texts.test
    for first in range(0, len(windows), 128):
        chosen = [windows[i] for i in range(first, min(first + 128, len(windows)))]
        tokens, next_tokens = (torch.stack(each) for each in zip(*chosen, strict=True))
        logits = model(tokens).flatten(0, 1)
        losses.append(F.cross_entropy(logits, next_tokens.flatten(), reduction="none"))
    return math.exp(float(torch.cat(losses).double().mean()))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| pruned | float32 | int8 | int8 / float32 |\n| --- | --: | --: | --: |")
    for name, arm in ARMS.items():
        plain, small = [], []
        for seed in options.seeds:
            training = trained(arm, seed)
            plain.append(perplexity(training.model, training))
            small.append(perplexity(rounded(training), training))
        costs = [100 * (after / before - 1) for before, after in zip(plain, small, strict=True)]
        cost = f"{statistics.mean(costs):+.2f} % ({min(costs):+.2f} to {max(costs):+.2f})"
        means = statistics.mean(plain), statistics.mean(small)
        print(f"| {name} | {means[0]:.3f} | {means[1]:.3f} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
