"""Lets Lightning's finetuning callbacks add parameters of layers that other stages keep."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.support.patched import patched


def parameters_told_apart_by_identity() -> AbstractContextManager[None]:
    """Inside the context, callbacks know by identity which parameters an optimizer has.

    Lightning compares values, which tensors on the meta device do not have; it also takes two
    parameters of the same values, such as the zeros of two biases, for one.
    """
    return patched(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in_optimizer))


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if parameter not in known]
