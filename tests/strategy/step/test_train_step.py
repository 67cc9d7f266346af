"""How few calls lie between the Trainer and the user's steps."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

import lightning_axosparse
from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, loader, trainer

PACKAGE = str(Path(lightning_axosparse.__file__).parent)
TRAINER = str(Path(L.__file__).parent)


class CountingNet(Net):
    """Notes the package's calls between the Trainer and each step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, set[tuple[str, ...]]] = {}

    def note(self, step: str) -> None:
        names: list[str] = []
        for frame in reversed(traceback.extract_stack()):
            if frame.filename.startswith(TRAINER):
                break
            if frame.filename.startswith(PACKAGE):
                names.insert(0, frame.name)
        self.calls.setdefault(step, set()).add(tuple(names))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validate")
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("predict")
        return self(batch[0])


@pytest.mark.parametrize("g_inter", [1, 3])
def test_a_batch_passes_five_calls_at_most(g_inter: int) -> None:
    module = CountingNet()
    run = trainer(
        AxoSparseStrategy(g_inter, microbatches=4, transport="loopback", pipeline="model"),
        max_epochs=1,
    )
    run.fit(module, loader(1), loader(2, batches=2))
    run.predict(module, loader(2, batches=2))
    assert module.calls.keys() == {"train", "validate", "predict"}
    for calls in module.calls.values():
        assert all(0 < len(names) <= 5 for names in calls), calls
