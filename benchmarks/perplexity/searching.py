"""Measures the memory that the search for a ticket takes beside weights and optimizer state.

    python -m benchmarks.perplexity.searching

Prints the bytes of a window of masks, and how much the resident set grows at most while masks are
computed, by score. The largest weight matters: scores are computed weight by weight.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.memory.step import resident
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.pruning.rule import MaskRule

WINDOW = 5


def measure(width: int, depth: int, score: str) -> dict[str, int]:
    """Fill a window of masks; bytes."""
    torch.manual_seed(0)
    model = GPT(width=width, depth=depth, heads=max(1, width // 64), vocabulary=10_000)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    rule = MaskRule(0.8, score, floor=0.05)
    sizes = rule.sizes(model)
    base = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    window = [MaskBits(rule.masks(model, [optimizer])) for _ in range(WINDOW)]
    count = sum(size.numel() for size in sizes.values())
    return {
        "entries": count,
        "weights": 4 * count,
        "largest": 4 * max(size.numel() for size in sizes.values()),
        "window": sum(b.nbytes for masks in window for b in masks.state_dict()["bits"].values()),
        "peak": resident("VmHWM") - base,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=768)
    arguments.add_argument("--depth", type=int, default=12)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    measure(64, 1, "saliency")  # so that code and tables are loaded
    columns = ["score", "weights", "the largest"]
    columns += ["window of 5 masks", "bits an entry", "most growth"]
    print(f"| {' | '.join(columns)} |\n| --- | --: | --: | --: | --: | --: |")
    for score in ("magnitude", "saliency"):
        found = measure(options.width, options.depth, score)
        sizes = [f"{found[key] / 1e6:.1f} MB" for key in ("weights", "largest", "window")]
        bits = 8 * found["window"] / WINDOW / found["entries"]
        cells = [score, *sizes, f"{bits:.2f}", f"{found['peak'] / 1e6:.1f} MB"]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
