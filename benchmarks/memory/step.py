"""Measures a training step's memory: dense, sparse, and pruned by PyTorch and by Lightning.

    python -m benchmarks.memory.step

Every row is a separate process. "peak" is the largest resident set during two training steps,
minus that of the process before the model was built; "state" is the bytes of weights, indices,
gradients and optimizer state; "files" are the pages of libraries in the peak, which the processes
of a machine share and the system may drop. "sparse" is pruned before the first step, "drawn" after
two dense ones; masks have one bit an entry, as in a ticket. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch.nn.utils import prune

from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.pruning.rule import MaskRule
from lightning_axosparse.sparse.module.parameters import state_bytes

VARIANTS = (
    "dense",
    "sparse 0.8",
    "sparse 0.9",
    "drawn 0.8",
    "drawn 0.9",
    "prune 0.9",
    "ModelPruning 0.9",
)
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "262144"}
"""With this setting the C library returns freed blocks from 256 KiB on to the system at once."""
TOKENS = 128


def resident(key: Literal["VmRSS", "VmHWM", "VmData", "RssFile"]) -> int:
    """Return bytes of this process: its resident set, the set's peak, of files, or writable."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def method_of(masks: dict[str, torch.Tensor]) -> type[prune.BasePruningMethod]:
    """Return a pruning method with given masks.

    PyTorch's "l1_unstructured" finds the same masks by sorting nine tenths of all weights, which
    takes minutes.
    """

    class Given(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def __init__(self, amount: float) -> None:
            pass

        def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
            return torch.cat([mask.reshape(-1) for mask in masks.values()]).to(default_mask)

    return Given


def prune_before_training(model: GPT, kind: str, ratio: float) -> None:
    """Prune ``model`` by magnitude as the variant says."""
    masks = masks_of(model, ratio)
    if kind == "sparse":
        bits = MaskBits(masks)
        masks.clear()
        sparsify(model, bits)
        return
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in masks}
    if kind == "prune":
        for name, mask in masks.items():
            prune.custom_from_mask(owners[name], "weight", mask)
        return
    # The callback's hooks at the start of fit and at the end of an epoch.
    pruned = [(owner, "weight") for owner in owners.values()]
    callback = ModelPruning(method_of(masks), pruned, amount=ratio)
    trainer = Trainer(logger=False, enable_checkpointing=False)
    callback.setup(trainer, model, "fit")
    callback.on_train_epoch_end(trainer, model)


def masks_of(model: GPT, ratio: float, floor: float = 0.0) -> dict[str, torch.Tensor]:
    return MaskRule(ratio, "magnitude", floor=floor).masks(model)


def train(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Train two steps."""
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.randint(10_000, (1, TOKENS))
        torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0]).backward()
        optimizer.step()


def measure(variant: str, width: int, depth: int) -> dict[str, float]:
    """Train two steps of one variant; megabytes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    base, files = resident("VmRSS"), resident("RssFile")
    model = GPT(width=width, depth=depth, heads=16, context=TOKENS, vocabulary=10_000)
    kind, _, ratio = variant.partition(" ")
    if kind not in ("dense", "drawn"):
        prune_before_training(model, kind, float(ratio))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, 1e-4)
    if kind == "drawn":
        train(model, optimizer)
        sparsify(model, MaskBits(masks_of(model, float(ratio))), optimizer)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    train(model, optimizer)
    state = state_bytes(model, optimizer)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters) / 1e6,
        "peak": (resident("VmHWM") - base) / 1e6,
        "files": (resident("RssFile") - files) / 1e6,  # they stay, so they were there at the peak
        "state": (state.total + buffers) / 1e6,
    }


def in_a_process(variant: str, malloc: dict[str, str], width: int, depth: int) -> dict[str, float]:
    """Measure a variant in a new process, where nothing else has used memory."""
    call = f"print(json.dumps(measure({variant!r}, {width}, {depth})))"
    command = [sys.executable, "-c", f"import json; from {__spec__.name} import measure; {call}"]
    inherited = {name: value for name, value in os.environ.items() if name not in RETURNED}
    environment = {**inherited, "OMP_NUM_THREADS": "1", **malloc}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--variant", action="append", choices=VARIANTS[1:])
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--depth", type=int, default=20)
    options = arguments.parse_args()
    print("| weights | stored parameters | state | dense / this | peak | dense / this ", end="")
    print("| peak without files | dense / this | peak, default malloc | dense / this |")
    print("| --- " + 9 * "| --: " + "|")
    dense: list[float] = []
    for variant in ("dense", *(options.variant or VARIANTS[1:])):
        size = options.width, options.depth
        row, by_default = (in_a_process(variant, malloc, *size) for malloc in (RETURNED, {}))
        private = row["peak"] - row["files"]
        figures = [row["state"], row["peak"], private, by_default["peak"]]
        dense = dense or figures
        pairs = zip(figures, dense, strict=True)
        cells = " | ".join(f"{figure:.0f} MB | {base / figure:.1f}" for figure, base in pairs)
        print(f"| {variant} | {row['parameters']:.0f} M | {cells} |", flush=True)


if __name__ == "__main__":
    main()
