"""Multiplies learning rates in a step, whatever schedules them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of all parameter groups inside the context.

    Schedulers, which may compute a rate from the one before, see the rates as they are outside. A
    rate that is set inside the context stays as it was set.

    Args:
        optimizer: the optimizer that steps inside.
        factor: what its rates are multiplied by.
    """
    groups = [group for group in optimizer.param_groups if "lr" in group]
    own = [group["lr"] for group in groups]
    scaled = own if factor == 1 else [rate * factor for rate in own]
    for group, rate in zip(groups, scaled, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, before, rate in zip(groups, own, scaled, strict=True):
            if group["lr"] is rate:
                group["lr"] = before
