"""Memory and time of a training step of GPT-3 XL (1.3B) and 2.7B on one GPU, dense and sparse.

    python -m benchmarks.gpu.step              # on a CUDA device
    python -m benchmarks.gpu.step --tiny       # on CPU: does it all work?

AdamW on float32 weights, bf16 autocast, one sequence a step, random masks. First the Triton kernels
are checked against the reference on the device, and a sparse step against a masked dense one; then
prints a Markdown table. A variant that does not fit into memory says so.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.masks import prunable
from lightning_axosparse.sparse import kernels
from lightning_axosparse.sparse.accounting import state_bytes
from lightning_axosparse.sparse.formats import FORMATS, layout_of
from lightning_axosparse.sparse.kernels import reference


@dataclass(frozen=True)
class Shape:
    """A GPT's."""

    name: str
    width: int
    depth: int
    heads: int
    context: int
    vocabulary: int

    def build(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        with device:
            return GPT(
                width=self.width,
                depth=self.depth,
                heads=self.heads,
                context=self.context,
                vocabulary=self.vocabulary,
            )


SHAPES = (
    Shape("GPT-3 XL", 2048, 24, 16, 2048, 51200),
    Shape("GPT-3 2.7B", 2560, 32, 32, 2048, 51200),
)
TINY = (Shape("tiny", 64, 2, 2, 32, 100),)


def masks(model: nn.Module, ratio: float) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {name: torch.rand_like(parameters[name]) >= ratio for name in prunable(model)}


def steps(model: nn.Module, shape: Shape, device: torch.device) -> Iterator[float]:
    """Train without end; the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(shape.vocabulary, (1, shape.context), device=device)
    while True:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(tokens)[0], tokens[0])
        loss.backward()
        optimizer.step()
        model.measured = state_bytes(model, optimizer).total  # type: ignore[assignment]
        yield loss.item()


def check_kernels(device: torch.device) -> None:
    """Every format's kernel gives the reference's entries."""
    for name in FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            dense = torch.randn(300, 1000, device=device).to(dtype)
            layout = layout_of(torch.rand(300, 1000, device=device) < 0.1, name)
            values = layout.compress(dense)
            assert torch.equal(values, dense.flatten()[layout.positions().long()]), name
            for tile in layout.tiles:
                made, expected = torch.empty(2, tile.numel, dtype=dtype, device=device)
                kernels.densify(layout, tile, values[tile.entries], made)
                reference.densify(layout, tile, values[tile.entries], expected)
                assert torch.equal(made, expected), name


def check_numbers(shape: Shape, device: torch.device) -> None:
    """The first losses of a sparse model are those of the masked dense one."""
    dense = shape.build(device)
    kept = masks(dense, 0.8)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            if name in kept:
                parameter.mul_(kept[name])
    sparse = copy.deepcopy(dense)
    sparsify(sparse, kept)
    losses = [next(steps(model, shape, device)) for model in (dense, sparse)]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


def measure(shape: Shape, ratio: float, device: torch.device, trials: int) -> dict[str, float]:
    """Seconds of a step, and gigabytes at its peak (0 on CPU) and in its model state."""
    model = shape.build(device)
    if ratio:
        sparsify(model, masks(model, ratio))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    training, seconds = steps(model, shape, device), []
    for _ in range(trials + 2):
        start = time.perf_counter()
        next(training)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "seconds": statistics.median(seconds[2:]),
        "peak": peak / 1e9,
        "state": model.measured / 1e9,  # type: ignore[operator]
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tiny", action="store_true", help="a small model on CPU")
    arguments.add_argument("--trials", type=int, default=10)
    options = arguments.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("No CUDA device here: run with --tiny to try the script on CPU.")
    device = torch.device("cpu" if options.tiny else "cuda")
    check_kernels(device)
    check_numbers(TINY[0], device)
    print("| model | pruned | peak | dense / this | state | dense / this | step | dense / this |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for shape in TINY if options.tiny else SHAPES:
        dense: dict[str, float] = {}
        for ratio in (0.0, 0.8, 0.9):
            try:
                found = measure(shape, ratio, device, options.trials)
            except torch.cuda.OutOfMemoryError:
                print(f"| {shape.name} | {ratio:.0%} | out of memory | | | | | |")
                continue
            dense = found if ratio == 0 else dense
            peaks, states, times = (
                f"{dense[key] / found[key]:.3f}" if dense and found[key] else "-"
                for key in ("peak", "state", "seconds")
            )
            milliseconds = found["seconds"] * 1e3
            print(
                f"| {shape.name} | {ratio:.0%} | {found['peak']:.2f} GB | {peaks} "
                f"| {found['state']:.3g} GB | {states} | {milliseconds:.1f} ms | {times} |"
            )


if __name__ == "__main__":
    main()
