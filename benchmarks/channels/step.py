"""Measures a training step of VGG-16 with fewer channels against one with all.

    python -m benchmarks.channels.step

Images of 32 x 32, float32, SGD with momentum, scales as of an untrained network that was slimmed at
random. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse import ChannelTicket
from lightning_axosparse.examples.vgg import VGG


def slimmed(ratio: float) -> nn.Module:
    torch.manual_seed(0)
    model = VGG()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
    if ratio:
        ChannelTicket.largest(model, ratio).apply(model)
    return copy.deepcopy(model)


def training_step(model: nn.Module, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    images, classes = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--trials", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=1)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    models = {ratio: slimmed(ratio) for ratio in (0.0, *given.ratios)}
    runs = {str(ratio): training_step(model, given.batch) for ratio, model in models.items()}
    seconds = median_seconds(runs, given.trials)
    print(
        "| channels pruned | parameters | weights, gradients, momentum | step | of the dense step |"
    )
    print("| --- | --: | --: | --: | --: |")
    for ratio, model in models.items():
        size, time = sum(p.numel() for p in model.parameters()), seconds[str(ratio)]
        cells = f"{size / 1e6:.2f} M | {12e-6 * size:.1f} MB | {time * 1e3:.0f} ms"
        print(f"| {ratio:.0%} | {cells} | {time / seconds['0.0']:.0%} |")


if __name__ == "__main__":
    main()
