from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, loader, trainer

OF_A_RUN: list[Callable[[AxoSparseStrategy], Any]] = [
    lambda strategy: strategy.in_flight,
    lambda strategy: strategy.local_parameters(),
    lambda strategy: list(strategy.whole_parameters()),
    lambda strategy: strategy.on_train_end(),
]


def test_what_a_run_has_is_there_only_while_it_runs() -> None:
    run = trainer(AxoSparseStrategy(2, transport="loopback"), max_epochs=1, limit_train_batches=1)
    for fit in (False, True):
        if fit:
            run.fit(Net(), loader(1))
        for ask in OF_A_RUN:
            with pytest.raises(RuntimeError, match="holds a module only while the Trainer runs"):
                ask(run.strategy)


def test_at_rest_steps_and_checkpoints_are_those_of_one_process() -> None:
    strategy, module = AxoSparseStrategy(2, transport="loopback"), Net()
    trainer(strategy).strategy.connect(module)
    batch = next(iter(loader(1)))
    assert torch.equal(strategy.predict_step(batch, 0), module.predict_step(batch, 0))
    assert strategy.lightning_module_state_dict().keys() == module.state_dict().keys()
