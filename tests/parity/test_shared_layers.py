"""One object without tensors may stand at several places among the layers, as activations do."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import CLASSES, FEATURES, Net, Record, difference, fit, trainer


class Shared(Net):
    """An activation and a dropout of one object each, on both stages."""

    def __init__(self) -> None:
        super().__init__()
        act, drop, width = nn.ReLU(), nn.Dropout(0.0), 24
        layers = (nn.Linear(FEATURES, width), act, drop, nn.Linear(width, width), act, drop)
        self.model = nn.Sequential(*layers, nn.Linear(width, width), act, nn.Linear(width, CLASSES))


@pytest.fixture(scope="module")
def alone() -> Record:
    return train("auto")


def train(strategy: Any) -> Record:
    L.seed_everything(0, verbose=False)
    return fit(trainer(strategy, max_epochs=1), Shared())


@pytest.mark.parametrize(("stages", "recompute"), [(2, None), (3, "sqrt"), (1, None)])
def test_one_activation_stands_on_several_stages(
    stages: int, recompute: Any, alone: Record
) -> None:
    strategy = AxoSparseStrategy(stages, 4, transport="loopback", recompute=recompute)
    assert difference(train(strategy), alone) < 1e-6
