"""Masters: float32 values of weights that read in fewer bits, as optimizer states carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_axosparse.sparse.optimizer import expand_state
from lightning_axosparse.sparse.swap import Owned

MASTER = "master"
"""Name, in the optimizer's state of a parameter, of its values before they were rounded."""


def unrounded(value: Tensor, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of ``dtype`` that were kept, but where somebody has changed the rounded ones.

    Args:
        value: the rounded values.
        kept: the values that they were rounded from, of ``dtype``; None if there are none.
        dtype: float32, or wider.
    """
    wide = value.to(dtype)
    return wide if kept is None else torch.where(kept.to(value.dtype) == value, kept, wide)


def state_with_master(entry: Owned, state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer state of a sparsely stored parameter as a checkpoint has it: dense.

    It has the parameter's values as well, if the weight, as it reads, does not hold all their bits.
    """
    layout, reading = entry.layout, entry.reading
    assert layout is not None
    assert reading is not None
    values = entry.parameter.detach()
    if not torch.equal(values.to(reading.dtype).to(values.dtype), values):
        state = {**state, MASTER: values}
    return expand_state(state, layout)


def restore_masters(optimizer: Optimizer, entries: Iterable[Owned]) -> None:
    """Give sparsely stored parameters the values that an optimizer's loaded state has of them."""
    for entry in entries:
        parameter, reading = entry.parameter, entry.reading
        assert reading is not None
        if MASTER in optimizer.state.get(parameter, {}):
            kept = optimizer.state[parameter].pop(MASTER).to(parameter.device)
            with torch.no_grad():
                rounded = parameter.to(reading.dtype)
                parameter.copy_(unrounded(rounded, kept, parameter.dtype))
