"""Measures LSTM and GRU layers on kept values, and with a dense weight, against dense layers.

    python -m benchmarks.overhead.recurrent

One thread, float32, random masks, one layer with as many inputs as units. Prints a Markdown table:
the dense layer's time for a forward and a backward pass, or for a forward pass without gradients,
and the ratios to it of the two ways to run a pruned one, between which
``sparse/kept_recurrent.py`` chooses.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse import sparsify
from lightning_axosparse.sparse.ways import Compute

LAYERS: dict[str, type[nn.LSTM | nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}


def pruned(layer: nn.Module, ratio: float, compute: Compute) -> nn.Module:
    layer = copy.deepcopy(layer)
    matrices = {name: p for name, p in layer.named_parameters() if p.dim() > 1}
    torch.manual_seed(0)
    masks = {name: torch.rand(p.shape) > ratio for name, p in matrices.items()}
    sparsify(layer, masks, compute=compute)
    return layer


def trained(layer: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def run() -> None:
        layer.zero_grad()
        inputs.grad = None
        layer(inputs)[0].sum().backward()

    return run


def evaluated(layer: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            layer(inputs)

    return run


PASSES = {"forward + backward": trained, "inference": evaluated}


def row(
    kind: str, passes: str, width: int, size: tuple[int, int], ratios: list[float], trials: int
) -> str:
    torch.manual_seed(0)
    dense = LAYERS[kind](width, width)
    layers: dict[str, nn.Module] = {"dense": dense}
    for ratio in ratios:
        layers[f"{ratio} dense"] = pruned(dense, ratio, "dense")
        layers[f"{ratio} kept"] = pruned(dense, ratio, "sparse")
    inputs = torch.randn(*size, width, requires_grad=True)
    runners = {key: PASSES[passes](layer, inputs) for key, layer in layers.items()}
    seconds = median_seconds(runners, trials)
    cells = [
        " / ".join(
            f"{seconds[f'{ratio} {way}'] / seconds['dense']:.2f}" for way in ("dense", "kept")
        )
        for ratio in ratios
    ]
    place = f"{kind}, {passes} | {width} | {size[1]} x {size[0]}"
    return f"| {place} | {seconds['dense'] * 1e3:.1f} ms | {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kinds", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    arguments.add_argument("--passes", nargs="+", choices=list(PASSES), default=list(PASSES))
    arguments.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024])
    arguments.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    arguments.add_argument("--steps", type=int, default=32)
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.7, 0.8, 0.9, 0.95])
    arguments.add_argument("--trials", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    heads = " | ".join(f"{ratio:.0%}: dense weight / kept values" for ratio in options.ratios)
    print(f"| layer | units | sequences x steps | dense layer | {heads} |")
    print(f"| --- | --: | --: | --: {'| --: ' * len(options.ratios)}|")
    for kind in options.kinds:
        for passes in options.passes:
            for width in options.widths:
                for sequences in options.sequences:
                    size = options.steps, sequences
                    print(
                        row(kind, passes, width, size, options.ratios, options.trials), flush=True
                    )


if __name__ == "__main__":
    main()
