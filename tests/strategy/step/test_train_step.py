"""How few calls lie between the Trainer and the user's steps."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_axosparse
from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import FEATURES, Net, loader, trainer

PACKAGE = str(Path(lightning_axosparse.__file__).parent)
TRAINER = str(Path(L.__file__).parent)


class CountingNet(Net):
    """Notes the package's calls between the Trainer and the run of each step that counts."""

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
def test_a_batch_passes_eight_calls_at_most(g_inter: int) -> None:
    module = CountingNet()
    run = trainer(
        AxoSparseStrategy(g_inter, microbatches=4, transport="loopback", pipeline="model"),
        max_epochs=1,
    )
    run.fit(module, loader(1), loader(2, batches=2))
    run.predict(module, loader(2, batches=2))
    assert module.calls.keys() == {"train", "validate", "predict"}
    for calls in module.calls.values():
        assert all(0 < len(names) <= 8 for names in calls), calls


@dataclass(frozen=True)
class Scores:
    logits: Tensor


class Scoring(Net):
    """Returns a frozen dataclass, which Lightning leaves as it is."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return Scores(self(batch[0]))

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen = outputs


def test_a_step_may_return_a_frozen_dataclass() -> None:
    module = Scoring()
    run = trainer(AxoSparseStrategy(3, 4, transport="loopback", pipeline="model"))
    run.validate(module, loader(2, batches=1), verbose=False)
    (x, _), *_ = loader(2, batches=1)
    torch.testing.assert_close(module.seen.logits, module(x))


ENTERED: list[int] = []
"""Not of the module: what a step changes there is copied at each step."""


class Linears(L.LightningModule):
    """Counts the functions of the package that each training step enters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_batch_start(self, *_: Any) -> None:
        ENTERED.append(0)
        sys.setprofile(self.count)

    def count(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code  # A comprehension is no call of a function.
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            ENTERED[-1] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("loss", ["whole", "mean"])
def test_a_step_enters_few_functions(loss: str) -> None:
    ENTERED.clear()
    module, x = Linears(), torch.randn(48, 8)
    strategy = AxoSparseStrategy(2, microbatches=4, transport="loopback", loss=loss)
    run = trainer(strategy, max_epochs=1)
    run.fit(module, DataLoader(TensorDataset(x, x), 8))
    first, *_, before_last, last = ENTERED
    assert 500 < before_last == last < min(1700, first)


class Growing(Linears):
    """Appends to a list of tensors in each step, as validation steps often do."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss


def test_a_list_that_grows_makes_no_step_longer() -> None:
    ENTERED.clear()
    module, x = Growing(), torch.randn(15 * 8, 8)
    strategy = AxoSparseStrategy(2, microbatches=4, transport="loopback")
    trainer(strategy, max_epochs=1).fit(module, DataLoader(TensorDataset(x, x), 8))
    assert len(set(ENTERED[8:])) == 1  # The eighth batch is the last one that is compared.
    assert len(module.outputs) == 15


class ComputesTheBatch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, FEATURES)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [self.before(batch[0]), batch[1]]


@pytest.mark.parametrize("loss", ["whole", "mean"])
def test_a_batch_with_a_graph_is_refused_where_steps_get_copies(loss: str) -> None:
    strategy = AxoSparseStrategy(2, 2, transport="loopback", pipeline="model", loss=loss)
    with pytest.raises(MisconfigurationException, match="computes the batch with trained"):
        trainer(strategy).fit(ComputesTheBatch(), loader(1))
