"""Measures pruned convolutions on unpruned values, and with a dense weight, against dense layers.

    python -m benchmarks.overhead.convolutions

One thread, float32, random masks; the layers are those of ResNet-18 and ResNet-50. Prints a
Markdown table: the dense layer's time for a forward and a backward pass, and the ratios to it of
the two ways to run a pruned one, between which ``sparse/ops/convolution.py`` chooses.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn

from benchmarks.overhead.interleaved import median_seconds
from benchmarks.overhead.step import forward_backward
from lightning_axosparse import sparsify
from lightning_axosparse.sparse.backend import Compute

LAYERS = {  # images, channels, outputs, kernel, stride, height and width
    "3x3, 64 channels": (4, 64, 64, 3, 1, 56),
    "3x3, 128 channels": (4, 128, 128, 3, 1, 28),
    "3x3, 128 to 256, stride 2": (4, 128, 256, 3, 2, 28),
    "3x3, 256 channels": (8, 256, 256, 3, 1, 14),
    "3x3, 512 channels": (16, 512, 512, 3, 1, 7),
    "1x1, 64 to 256": (4, 64, 256, 1, 1, 56),
    "1x1, 256 to 64": (4, 256, 64, 1, 1, 56),
    "1x1, 256 to 512, stride 2": (4, 256, 512, 1, 2, 56),
    "1x1, 1024 to 256": (8, 1024, 256, 1, 1, 14),
    "1x1, 512 to 2048": (16, 512, 2048, 1, 1, 7),
}


def pruned(layer: nn.Module, ratio: float, compute: Compute) -> nn.Module:
    layer = copy.deepcopy(layer)
    shape = layer.get_parameter("weight").shape
    sparsify(layer, {"weight": torch.rand(shape) > ratio}, compute=compute)
    return layer


def row(name: str, ratios: list[float], trials: int) -> str:
    torch.manual_seed(0)
    images, channels, outputs, kernel, stride, size = LAYERS[name]
    dense = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False)
    layers = {"dense": dense}
    for ratio in ratios:
        layers[f"{ratio} dense"] = pruned(dense, ratio, "dense")
        layers[f"{ratio} kept"] = pruned(dense, ratio, "sparse")
    inputs = torch.randn(images, channels, size, size, requires_grad=True)
    runners = {key: forward_backward(layer, inputs) for key, layer in layers.items()}
    seconds = median_seconds(runners, trials)
    cells = [
        " / ".join(
            f"{seconds[f'{ratio} {way}'] / seconds['dense']:.2f}" for way in ("dense", "kept")
        )
        for ratio in ratios
    ]
    place = f"{name} | {images} x {size} x {size}"
    return f"| {place} | {seconds['dense'] * 1e3:.1f} ms | {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.7, 0.8, 0.9, 0.95])
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    heads = " | ".join(f"{ratio:.0%}: dense weight / unpruned values" for ratio in options.ratios)
    print(f"| layer | images | dense layer | {heads} |")
    print(f"| --- | --- | --: {'| --: ' * len(options.ratios)}|")
    for name in options.layers:
        print(row(name, options.ratios, options.trials), flush=True)


if __name__ == "__main__":
    main()
