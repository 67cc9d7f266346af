"""Makes the smaller dense GPT that takes as much as a pruned one, to compare the two."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.support.arguments import COUNT, POSITIVE, checked, number


@checked(
    ValueError,
    pruning_ratio=number("a number in (0, 1)", lambda ratio: 0 < ratio < 1),
    kept_weight=POSITIVE,
    width=COUNT,
    depth=COUNT,
    heads=COUNT,
    depth_divisor=COUNT,
    learning_rate_factor=POSITIVE,
)
def smaller_gpt(
    pruning_ratio: float,
    kept_weight: float,
    width: int,
    depth: int,
    heads: int,
    learning_rate: float,
    depth_divisor: int = 1,
    learning_rate_factor: float = 1.0,
    **others: Any,
) -> GPT:
    """Return a dense GPT as large as the kept part of a pruned one.

    Its width is the multiple of ``heads`` that comes closest.

    Args:
        pruning_ratio: fraction pruned of the weights of the large model, embeddings included.
        kept_weight: what a kept weight takes, in dense weights: 1 for equal weights; for equal
            bytes 17 / 16, as AdamW takes 16 bytes of a dense weight in float32, and a kept weight
            has a byte for its place.
        width: of the large model.
        depth: of the large model.
        heads: of both.
        learning_rate: of the large model.
        depth_divisor: by what the depth is divided, rounded down, to at least one block.
        learning_rate_factor: by what the learning rate is multiplied.
        others: of both, as for :class:`GPT`.

    Raises:
        ValueError: if an argument is out of range.
    """
    pruned, whole = _sizes(width, depth, heads, **others)
    budget = whole - pruned + (1 - pruning_ratio) * pruned * kept_weight
    shallow = max(1, depth // depth_divisor)

    def size(multiple: int) -> int:
        return _sizes(multiple * heads, shallow, heads, **others)[1]

    widths = range(1, 2 * depth_divisor * width // heads + 1)
    above = widths[min(bisect_left(widths, budget, key=size), len(widths) - 1)]
    closest = min((max(1, above - 1), above), key=lambda multiple: abs(size(multiple) - budget))
    return GPT(
        width=closest * heads,
        depth=shallow,
        heads=heads,
        learning_rate=learning_rate * learning_rate_factor,
        **others,
    )


def _sizes(width: int, depth: int, heads: int, **others: Any) -> tuple[int, int]:
    """Return the numbers of parameters that pruning takes its share of, and of all."""
    with torch.device("meta"):
        model = GPT(width=width, depth=depth, heads=heads, **others)
    sizes = [(parameter.dim() > 1, parameter.numel()) for parameter in model.parameters()]
    return sum(n for matrix, n in sizes if matrix), sum(n for _, n in sizes)
