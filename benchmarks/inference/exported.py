"""Measures a pruned network in another runtime, OpenVINO, beside this package's sparse products.

    pip install openvino
    python -m benchmarks.inference.exported [--width 1024] [--blocks 8] [--tokens 1 64]

The network is a stack of MLP blocks. Pruned, it is exported with its zeros. OpenVINO's CPU plugin
can compress weights of which a share is zero
(``CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE``); the property is set where a row says so. "int8" has
weights of eight bits with a scale for each output; the plugin rounds inputs as it sees fit
(``DYNAMIC_QUANTIZATION_GROUP_SIZE``). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.inference.models import quantized
from benchmarks.interleave import trials
from lightning_axosparse import Ticket, densify, load_sparse, sparsify
from lightning_axosparse.support.dense_products import without_mkl

RATIO = 0.9


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def in_openvino(
    model: nn.Module, inputs: Tensor, int8: bool = False, **properties: object
) -> Callable[[], Tensor]:
    """Compile a model for torch's number of threads; return a function that runs it."""
    import openvino as ov  # type: ignore[import-not-found, unused-ignore]

    exported = ov.convert_model(model, example_input=inputs)
    if int8:
        round_weights(exported)
    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, **properties}
    # The default precision where the processor has bfloat16 products.
    options["INFERENCE_PRECISION_HINT"] = "f32"
    request = ov.compile_model(exported, "CPU", options).create_infer_request()
    array = inputs.numpy()
    return lambda: torch.from_numpy(next(iter(request.infer([array]).values())))


def round_weights(model: Any) -> None:
    """Replace the weights of products by ones of eight bits, in the form that the plugin reads."""
    from openvino import opset13 as operators  # type: ignore[import-not-found, unused-ignore]

    for node in model.get_ops():
        if node.get_type_name() != "MatMul":
            continue
        weight = node.input_value(1).get_node().data  # (outputs, inputs): `transpose_b` is set
        scales = abs(weight).max(1, keepdims=True) / 127
        values = operators.constant((weight / scales).round().astype("int8"))
        wide = operators.convert(values, "f32")
        scaled = operators.multiply(wide, operators.constant(scales.astype("float32")))
        node.input(1).replace_source_output(scaled.output(0))


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
    small = copy.deepcopy(dense)
    load_sparse(small, dense.state_dict(), Ticket.magnitude(dense, RATIO), dtype=torch.int8)
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
            ("dense, int8", "torch"): in_torch(quantized(dense), x),
            ("dense, int8", "OpenVINO"): in_openvino(dense, x, int8=True),
            (f"{RATIO:.0%} pruned, int8", "this package"): in_torch(small, x),
        }
        expected = {"dense": in_torch(dense, x)(), "pruned": in_torch(zeros, x)()}
        for (weights, _), run in rows.items():
            wanted = expected["dense" if weights.startswith("dense") else "pruned"]
            error = (run() - wanted).std() / wanted.std()
            assert error < (0.02 if weights.endswith("int8") else 1e-3), (weights, error)
        runners = {key: (lambda trial, run=run: run()) for key, run in rows.items()}
        named = {" | ".join(key): runner for key, runner in runners.items()}
        medians = {k: statistics.median(v) for k, v in trials(named, options.trials).items()}
        fastest = min(value for key, value in medians.items() if key.startswith("dense |"))
        for key, median in medians.items():
            print(f"| {tokens} | {key} | {median * 1e3:.2f} | {median / fastest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
