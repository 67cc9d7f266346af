"""Measures the bytes of pruned weights on disk, with masks of a trained model and random ones."""

from __future__ import annotations

import math
from copy import deepcopy

import lightning as L
import torch
from torch import Tensor

from lightning_axosparse.checkpoint.safetensors import encode
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.rule import MaskRule

RATIOS = (0.5, 0.8, 0.9, 0.95, 0.99)
STEPS = 60


def trained() -> GPT:
    """Return a small GPT after its first steps on text."""
    L.seed_everything(0, verbose=False)
    model = GPT(width=128, depth=4, heads=4, context=64)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, datamodule=TextDataModule(context=64, batch_size=16, max_bytes=500_000))
    return model


def entropy(mask: Tensor) -> float:
    """Return the least bytes for the positions of kept entries, if they were independent."""
    kept = float(mask.double().mean())
    if kept in (0, 1):
        return 0
    bits = -kept * math.log2(kept) - (1 - kept) * math.log2(1 - kept)
    return bits * mask.numel() / 8


def row(weights: dict[str, Tensor], masks: dict[str, Tensor]) -> list[float]:
    """Return ratios to the bytes of unpruned values: by entropy, values as they are, as written."""
    kept = least = places = packed = 0.0
    for name, mask in masks.items():
        values = weights[name][mask]
        index, code = encode(values, mask)
        kept += values.nbytes
        least += entropy(mask)
        places += index.numel()
        packed += index.numel() + code.numel()
    return [1 + least / kept, 1 + places / kept, packed / kept]


def main() -> None:
    model = trained()
    print("| dtype | pruned | mask | by entropy | values as they are | as written |")
    print("| --- | --: | --- | --: | --: | --: |")
    for dtype in (torch.float32, torch.bfloat16):
        cast = deepcopy(model).to(dtype)
        weights = {n: p.detach() for n, p in cast.named_parameters()}
        for ratio in RATIOS:
            masks = MaskRule(ratio, "magnitude").masks(cast)
            drawn = {n: torch.rand(m.shape) >= ratio for n, m in masks.items()}
            for kind, chosen in (("magnitude", masks), ("random", drawn)):
                ratios = " | ".join(f"{ratio:.3f}" for ratio in row(weights, chosen))
                print(f"| {str(dtype)[6:]} | {100 * ratio:.0f} % | {kind} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
