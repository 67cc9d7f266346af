"""Finds the averaged copies of the module that Lightning's callbacks keep."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_axosparse.strategy.compat.hooks import callbacks_of


def weight_averages(trainer: pl.Trainer) -> list[nn.Module]:
    """The averages of all callbacks that have one, with the names of the module's tensors."""
    averages = [
        callback._average_model
        for callback in callbacks_of(trainer)
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging)
    ]
    return [
        average.module if isinstance(average, AveragedModel) else average
        for average in averages
        if average is not None
    ]
