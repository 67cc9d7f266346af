"""Measures memory and time of a training step of GPT-3 XL (1.3B) and 2.7B on one GPU.

    python -m benchmarks.gpu.step              # on a CUDA device
    python -m benchmarks.gpu.step --tiny       # on CPU: does it all work?

Fused AdamW on float32 weights, bf16 autocast, dense and with random masks, with and without
activation checkpointing, without and with dense copies. First a sparse step is compared with a
masked dense one. Prints a Markdown table; every sparse model's steps are interleaved with the dense
one's. "GPU" is the time of a step's kernels: a step takes longer where Python takes longer to start
them. For a model that does not fit into memory the row says so.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.timing import kernel_seconds, median_seconds
from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import GPT, Block
from lightning_axosparse.pruning.rule import prunable
from lightning_axosparse.sparse.backend import Compute
from lightning_axosparse.sparse.module.parameters import state_bytes

COMPUTES: tuple[Compute, ...] = "auto", "samo"


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT."""

    name: str
    width: int
    depth: int
    heads: int
    context: int
    vocabulary: int

    def build(self, device: torch.device) -> GPT:
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


class Training:
    """A model, its optimizer and one batch.

    Args:
        model: the model to train.
        device: the model's device.
        sequences: of the batch.
    """

    def __init__(self, model: GPT, device: torch.device, sequences: int) -> None:
        self._model, self._device = model, device
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        vocabulary = model.hparams["vocabulary"]
        self._tokens = torch.randint(vocabulary, (sequences, model.context), device=device)

    def step(self) -> Tensor:
        """Train on the batch; return the loss."""
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16):
            logits = self._model(self._tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, self._tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients, optimizer state and indices."""
        return state_bytes(self._model, self._optimizer).total


def recompute(model: GPT) -> None:
    """Use activation checkpointing for every block."""
    for block in model.modules():
        if isinstance(block, Block):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def masks(model: nn.Module, ratio: float) -> dict[str, Tensor]:
    """Return random masks of the weights that a ticket would prune."""
    parameters = dict(model.named_parameters())
    return {name: torch.rand_like(parameters[name]) >= ratio for name in prunable(model)}


def check_numbers(shape: Shape, device: torch.device) -> None:
    """Check that a sparse model has the losses of the masked dense one, without and with copies."""
    dense = shape.build(device)
    kept = masks(dense, 0.8)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            if name in kept:
                parameter.mul_(kept[name])
    models = [dense]
    for compute in COMPUTES:
        models.append(copy.deepcopy(dense))
        sparsify(models[-1], kept, compute=compute)
    losses = []
    for model in models:
        torch.manual_seed(1)
        losses.append(Training(model, device, 1).step())
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-2, atol=1e-2)


@dataclass
class Measured:
    """Gigabytes at the peak of a step and of the model state, seconds of kernels, the training.

    Peak and kernels are 0 on CPU.
    """

    training: Training
    peak: float
    state: float
    kernels: float


def measure(model: GPT, device: torch.device, sequences: int, taken: int) -> Measured:
    """Train two steps, of which the first creates the optimizer's state, and one for the profiler.

    Args:
        model: the model to train.
        device: the model's device.
        sequences: of a batch.
        taken: bytes of the device that were in use before the model was built.
    """
    training = Training(model, device, sequences)
    for _ in range(2):
        training.step()
    peak = torch.cuda.max_memory_allocated() - taken if device.type == "cuda" else 0
    kernels = kernel_seconds(training.step, device)
    return Measured(training, peak / 1e9, training.state / 1e9, kernels)


def build(
    shape: Shape,
    recomputes: bool,
    ratio: float,
    compute: Compute,
    device: torch.device,
    sequences: int,
) -> Measured:
    """Build, prune and measure a model of this shape."""
    gc.collect()
    taken = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        taken = torch.cuda.memory_allocated()
    model = shape.build(device)
    if ratio:
        sparsify(model, masks(model, ratio), compute=compute)
    if recomputes:
        recompute(model)
    if device.type == "cuda":  # building it is not a step
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return measure(model, device, sequences, taken)


def rows(
    shape: Shape, recomputes: bool, device: torch.device, sequences: int, trials: int
) -> Iterator[str]:
    """Return the rows of the table for one shape."""
    label = f"| {shape.name} | {'yes' if recomputes else 'no'}"
    dense = build(shape, recomputes, 0, "auto", device, sequences)
    yield (
        f"{label} | 0% | | {dense.peak:.2f} GB | 1 | {dense.state:.3g} GB | 1 "
        f"| {dense.kernels * 1e3:.1f} ms | 1 | | 1 |"
    )
    for ratio, compute in product((0.8, 0.9), COMPUTES):
        try:
            found = build(shape, recomputes, ratio, compute, device, sequences)
            runners = {"dense": dense.training.step, "this": found.training.step}
            seconds = median_seconds(runners, trials, device)
        except torch.cuda.OutOfMemoryError:
            yield f"{label} | {ratio:.0%} | {compute} | out of memory | | | | | | | |"
            continue
        peaks, kernels = "-", "-"
        if device.type == "cuda":
            peaks = f"{dense.peak / found.peak:.2f}"
            kernels = f"{found.kernels / dense.kernels:.3f}"
        yield (
            f"{label} | {ratio:.0%} | {compute} | {found.peak:.2f} GB | {peaks} "
            f"| {found.state:.3g} GB | {dense.state / found.state:.2f} "
            f"| {found.kernels * 1e3:.1f} ms | {kernels} "
            f"| {seconds['this'] * 1e3:.1f} ms | {seconds['this'] / seconds['dense']:.3f} |"
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tiny", action="store_true", help="a small model on CPU")
    arguments.add_argument("--trials", type=int, default=10)
    arguments.add_argument("--sequences", type=int, default=1, help="of 2048 tokens, in a batch")
    arguments.add_argument("--shapes", type=int, default=2, help="how many of the shapes")
    options = arguments.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("No CUDA device here: run with --tiny to try the script on CPU.")
    device = torch.device("cpu" if options.tiny else "cuda")
    check_numbers(TINY[0], device)
    print(
        "| model | recompute | pruned | compute | peak | dense / this | state | dense / this ",
        end="",
    )
    print("| GPU | this / dense | step | this / dense |")
    print("| --- | --- | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: |")
    shapes = TINY if options.tiny else SHAPES[: options.shapes]
    for shape, recomputes in product(shapes, (False, True)):
        for line in rows(shape, recomputes, device, options.sequences, options.trials):
            print(line, flush=True)


if __name__ == "__main__":
    main()
