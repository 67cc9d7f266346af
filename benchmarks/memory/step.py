"""Memory of a training step: dense, sparse at two ratios, and pruned by PyTorch and by Lightning.

    python -m benchmarks.memory.step

Every variant runs in a process of its own. "peak" is the largest resident set during two training
steps, above that of the process before the model was built; "state" counts the bytes of weights,
indices, gradients and optimizer state. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch.nn.utils import prune

from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.masks import magnitude_masks, prunable
from lightning_axosparse.sparse.accounting import state_bytes

VARIANTS = ("dense", "sparse 0.8", "sparse 0.9", "prune 0.9", "ModelPruning 0.9")
TOKENS = 128


def resident(peak: bool) -> int:
    """Bytes of this process's resident set, now or at its peak since the last reset."""
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def method_of(masks: dict[str, torch.Tensor]) -> type[prune.BasePruningMethod]:
    """A pruning method that has its masks from elsewhere.

    PyTorch's "l1_unstructured" finds the same ones by sorting nine tenths of all weights, which
    takes minutes; it leaves nothing else behind.
    """

    class Given(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def __init__(self, amount: float) -> None:
            pass

        def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
            return torch.cat([mask.reshape(-1) for mask in masks.values()]).to(default_mask)

    return Given


def measure(variant: str, width: int, depth: int) -> dict[str, float]:
    """Train two steps of one variant; megabytes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    base = resident(peak=False)
    model = GPT(width=width, depth=depth, heads=16, context=TOKENS, vocabulary=10_000)
    kind, _, ratio = variant.partition(" ")
    if kind != "dense":
        parameters = dict(model.named_parameters())
        sizes = prunable(model)
        masks = magnitude_masks(parameters, set(sizes), sizes, float(ratio))
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in masks}
        if kind == "sparse":
            sparsify(model, masks)
        elif kind == "prune":
            for name, mask in masks.items():
                prune.custom_from_mask(owners[name], "weight", mask)
        else:
            # What Lightning's callback does when fit starts and at the end of an epoch.
            pruned = [(owner, "weight") for owner in owners.values()]
            callback = ModelPruning(method_of(masks), pruned, amount=float(ratio))
            trainer = Trainer(logger=False, enable_checkpointing=False)
            callback.setup(trainer, model, "fit")
            callback.on_train_epoch_end(trainer, model)
        del masks, parameters
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.randint(10_000, (1, TOKENS))
        torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0]).backward()
        optimizer.step()
    state = state_bytes(model, optimizer)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return {
        "parameters": parameters / 1e6,
        "peak": (resident(peak=True) - base) / 1e6,
        "state": (state.total + buffers) / 1e6,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--variant")
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--depth", type=int, default=20)
    options = arguments.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.width, options.depth)))
        return
    # Freed blocks of this size go back to the system at once, so that the peak is the step's own.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    results = {}
    for variant in VARIANTS:
        command = [sys.executable, "-m", "benchmarks.memory.step", "--variant", variant]
        command += ["--width", str(options.width), "--depth", str(options.depth)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results[variant] = json.loads(done.stdout.splitlines()[-1])
    dense = results["dense"]
    print("| weights | stored parameters | peak of a step | dense / this | state | dense / this |")
    print("| --- | --: | --: | --: | --: | --: |")
    for variant, row in results.items():
        ratios = [dense[key] / row[key] for key in ("peak", "state")]
        print(
            f"| {variant} | {row['parameters']:.0f} M | {row['peak']:.0f} MB | {ratios[0]:.1f} "
            f"| {row['state']:.0f} MB | {ratios[1]:.1f} |"
        )


if __name__ == "__main__":
    main()
