"""The strategy answers what callbacks ask."""

from __future__ import annotations

import inspect

import lightning as L

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.callbacks.pruning_strategy import _ASKED, PruningStrategy, can_prune


def test_the_strategy_is_one_that_prunes() -> None:
    assert "sparsify" in _ASKED
    for name in _ASKED:
        asked, there = (
            inspect.getattr_static(c, name) for c in (PruningStrategy, AxoSparseStrategy)
        )
        if inspect.isfunction(asked):
            assert [*inspect.signature(asked).parameters] == [*inspect.signature(there).parameters]
        else:
            assert isinstance(there, property)
    assert can_prune(L.Trainer(strategy=AxoSparseStrategy(), accelerator="cpu", logger=False))
    assert not can_prune(L.Trainer(accelerator="cpu", devices=1, logger=False))
