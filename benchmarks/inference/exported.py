"""Measures a pruned network in another runtime, OpenVINO, beside this package's sparse products.

    pip install openvino
    python -m benchmarks.inference.exported [--width 1024] [--blocks 8] [--tokens 1 64]

The network is a stack of MLP blocks. Pruned, it is exported with its zeros. OpenVINO's CPU plugin
can compress weights of which a share is zero
(``CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE``); the property is set where a row says so. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.interleave import trials
from lightning_axosparse import Ticket, densify, sparsify
from lightning_axosparse.support.dense_products import without_mkl

RATIO = 0.9


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def in_openvino(model: nn.Module, inputs: Tensor, **properties: object) -> Callable[[], Tensor]:
    """Compile a model for torch's number of threads; return a function that runs it."""
    import openvino as ov  # type: ignore[import-not-found, unused-ignore]

    exported = ov.convert_model(model, example_input=inputs)
    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, **properties}
    # The default precision where the processor has bfloat16 products.
    options["INFERENCE_PRECISION_HINT"] = "f32"
    request = ov.compile_model(exported, "CPU", options).create_infer_request()
    array = inputs.numpy()
    return lambda: torch.from_numpy(next(iter(request.infer([array]).values())))


def in_torch(model: nn.Module, inputs: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return model(inputs)  # type: ignore[no-any-return]

    return run


def by_faster_products(model: nn.Module, inputs: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad(), without_mkl():
            return model(inputs)  # type: ignore[no-any-return]

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--blocks", type=int, default=8)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=15)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dense = nn.Sequential(*(Block(options.width) for _ in range(options.blocks))).eval()
    pruned = copy.deepcopy(dense)
    sparsify(pruned, Ticket.magnitude(dense, RATIO).masks)
    zeros = copy.deepcopy(pruned)
    densify(zeros)
    print(
        "| tokens | weights | runtime | ms | this / faster dense |\n| --: | --- | --- | --: | --: |"
    )
    for tokens in options.tokens:
        x = torch.randn(1, tokens, options.width)
        rows = {
            ("dense", "torch"): in_torch(dense, x),
            ("dense", "torch, products by oneDNN"): by_faster_products(dense, x),
            ("dense", "OpenVINO"): in_openvino(dense, x),
            (f"{RATIO:.0%} pruned", "OpenVINO"): in_openvino(zeros, x),
            (f"{RATIO:.0%} pruned", "OpenVINO, sparse weights"): in_openvino(
                zeros, x, CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE=0.5
            ),
            (f"{RATIO:.0%} pruned", "this package"): in_torch(pruned, x),
        }
        expected = in_torch(zeros, x)()
        for key, run in rows.items():
            if key[0] != "dense":
                torch.testing.assert_close(run(), expected, atol=1e-3, rtol=1e-3)
        runners = {key: (lambda trial, run=run: run()) for key, run in rows.items()}
        named = {" | ".join(key): runner for key, runner in runners.items()}
        medians = {k: statistics.median(v) for k, v in trials(named, options.trials).items()}
        fastest = min(value for key, value in medians.items() if key.startswith("dense"))
        for key, median in medians.items():
            print(f"| {tokens} | {key} | {median * 1e3:.2f} | {median / fastest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
