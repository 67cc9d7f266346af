"""What steps return is on the first rank, as one process has it, and costs no traffic."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from benchmarks.capacity.traffic import StepTraffic, step_traffic
from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks

EPOCHS = 2


class Returning(Net):
    """Returns logits: of training beside the loss, of validation without one, or none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.tested: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        return {"loss": loss, "logits": logits, "largest": logits.detach().abs().mean()}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 1:  # Calls no layer.
            self.log("mean of the batch", batch[0].mean())
            return None
        return self(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.tested.append(loss)
        return loss


class Outputs(Callback):
    """Keeps what steps returned."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Any]] = {"train": [], "validate": [], "test": [], "has": []}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept["train"].append(outputs)
        self.kept["has"].append(getattr(trainer.strategy, "has_step_outputs", True))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept["validate"].append(outputs)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept["test"].append(outputs)


def train(strategy: Any, ranks: int = 1) -> dict[str, list[Any]]:
    L.seed_everything(0, verbose=False)
    outputs, module = Outputs(), Returning().double()
    draw = EarlyBirdTicket(0.5, every="1 epoch", draw_by="1 epoch")
    run = trainer(
        strategy, ranks, precision="64-true", max_epochs=EPOCHS, callbacks=[outputs, draw]
    )
    run.fit(module, loader(1), loader(2, batches=3))
    outputs.kept["logged"] = [run.callback_metrics["mean of the batch"]]
    run.test(module, loader(3, batches=2), verbose=False)
    outputs.kept["tested"] = module.tested
    outputs.kept["predict"] = run.predict(module, loader(3, batches=2))
    return outputs.kept


def on_two_ranks() -> tuple[dict[str, Any], list[StepTraffic]]:
    sizes = (50, 4, 32), (400, 4, 64), (50, 6, 32)  # vocabulary, samples, context
    traffic = [step_traffic(*size, stages=2) for size in sizes]
    return train(AxoSparseStrategy(2, 4), 2), traffic


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(2, on_two_ranks)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    return train(AxoSparseStrategy())


def test_the_first_rank_has_them_and_the_other_the_loss(ranks: Any, expected: Any) -> None:
    for rank, (kept, _) in enumerate(ranks):
        assert set(kept["has"]) == {rank == 0}
        assert_close(kept["test"], expected["test"])
        assert_close(kept["predict"], expected["predict"])
        assert_close(kept["logged"], expected["logged"])
        if rank == 0:
            assert_close(kept["train"], expected["train"])
            assert_close(kept["validate"], expected["validate"])
            continue
        assert kept["validate"] == [None] * len(expected["validate"])
        for mine, whole in zip(kept["train"], expected["train"], strict=True):
            assert_close(mine, {"loss": whole["loss"]})


def test_a_list_that_a_step_fills_is_the_same_on_every_rank(ranks: Any, expected: Any) -> None:
    for kept, _ in ranks:
        assert_close(kept["tested"], expected["tested"])


def test_traffic_beside_activations_and_gradients_is_small_and_constant(ranks: Any) -> None:
    for _, steps in ranks:
        assert {step.collectives for step in steps} == {4}  # Lightning's, the gradients', the loss
        assert len({step.collective_bytes for step in steps}) == 1
        assert [step.messages for step in steps] == [4, 4, 6]
        for step in steps:
            assert step.header_bytes / step.messages == pytest.approx(215, abs=50)
            assert step.collective_bytes + step.header_bytes < 10_000
