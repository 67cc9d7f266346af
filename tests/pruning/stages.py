"""Makes parameters for the pruning tests and partitions them into stages."""

from __future__ import annotations

import torch
from torch import Tensor

SHARED = "shared.weight"


def make_parameters(seed: int, dtype: torch.dtype, ties: bool) -> dict[str, Tensor]:
    """Named tensors of odd shapes; with ``ties``, many magnitudes are equal."""
    generator = torch.Generator().manual_seed(seed)
    names = ["a.weight", SHARED, "b.weight", "c.weight", "d.weight"]
    parameters = {}
    for name in names:
        rows, columns = torch.randint(1, 9, (2,), generator=generator).tolist()
        tensor = torch.randn(rows, columns, generator=generator)
        parameters[name] = (tensor.mul(2).round() if ties else tensor).to(dtype)
    return parameters


def on_stage(parameters: dict[str, Tensor], stages: int, stage: int):
    """Return the parameters of ``stage`` and the names it counts; stage 0 counts shared ones."""
    layers = [name for name in parameters if name != SHARED]
    own = set(layers[stage::stages])
    held = {name: p for name, p in parameters.items() if name in own or name == SHARED}
    return held, own | ({SHARED} if stage == 0 else set())
