"""On one rank a step is Lightning's own; on replicas gradients are averaged around its backward."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    ModelPruning,
    OnExceptionCheckpoint,
)
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import loader, trainer
from tests.ranks import run_ranks

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Noting(Callback):
    """Notes the order of hooks, and what was logged when the batch ended."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.noted.append({k: float(v) for k, v in trainer.callback_metrics.items()})


for hook in HOOKS[:-1]:
    setattr(Noting, hook, lambda self, *_, _hook=hook: self.noted.append(_hook))


class Classifier(L.LightningModule):
    """Two parts, of which callbacks take the first for the backbone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.dropout(self.backbone(x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


class Skipping(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


class LineSearch(Classifier):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), max_iter=3)


class ReadsWhatItLogged(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert self.trainer.callback_metrics["loss"] == loss.detach()
        return loss


class TakesTurns(Classifier):
    """Optimizes by hand, with two optimizers stepped in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [SGD(self.backbone.parameters(), 0.1), Adam(self.head.parameters(), 1e-2)]


CASES: dict[str, tuple[type[Classifier], Callable[[], list[Callback]]]] = {
    "ordinary": (Classifier, list),
    "skips batches": (Skipping, list),
    "line search": (LineSearch, list),
    "reads what it logged": (ReadsWhatItLogged, list),
    "two optimizers by hand": (TakesTurns, list),
    "Lightning prunes": (Classifier, lambda: [ModelPruning("l1_unstructured", amount=0.5)]),
    "finetuning": (Classifier, lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]),
}


def trained(case: str, strategy: Any, folder: Path, devices: int = 1) -> dict[str, Any]:
    """What hooks saw, the weights, and the checkpoint that is written after the fit."""
    kind, callbacks = CASES[case]
    module, noting = kind(), Noting()
    torch.manual_seed(1)
    run = trainer(strategy, devices, callbacks=[noting, *callbacks()], num_sanity_val_steps=0)
    run.callbacks.pop(0)  # The record takes a loss of every batch.
    run.fit(module, loader(1), loader(2, batches=2))
    run.save_checkpoint(folder / "after.ckpt")
    saved = torch.load(folder / "after.ckpt", weights_only=False)
    return {
        "noted": noting.noted,
        "weights": saved["state_dict"],
        "optimizers": saved["optimizer_states"],
        "module": module.state_dict(),
    }


@pytest.mark.parametrize("case", CASES)
def test_one_rank_does_what_lightning_does_to_the_bit(case: str, tmp_path: Path) -> None:
    expected = trained(case, "auto", tmp_path)
    ours = trained(case, AxoSparseStrategy(), tmp_path)
    assert ours["noted"] == expected["noted"]
    for part in ("weights", "optimizers", "module"):
        torch.testing.assert_close(ours[part], expected[part], rtol=0, atol=0)


class Pickles(Callback):
    """Holds the Trainer, and is pickled in mid-training."""

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.trainer = trainer

    def on_train_batch_end(self, *_: Any) -> None:
        copy = pickle.loads(pickle.dumps(self.trainer.strategy))
        assert copy.g_inter == self.trainer.strategy.g_inter


@pytest.mark.parametrize("stages", [1, 2])
def test_a_trainer_goes_on_with_another_module(stages: int) -> None:
    strategy = AxoSparseStrategy(stages, pipeline="backbone", transport="loopback")
    run = trainer(strategy, callbacks=[Pickles()], max_epochs=1, limit_train_batches=2)
    first, second = Classifier(), Classifier()
    run.fit(first, loader(1))
    assert "test_loss" in run.test(second, loader(2), verbose=False)[0]
    run.fit_loop.max_epochs = 2
    run.fit(second, loader(1))
    before = Classifier().state_dict()
    for module in (first, second):
        assert not torch.equal(module.head.weight, before["head.weight"])


class WithoutLog(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_after_the_run_are_lightnings_own(stages: int) -> None:
    module, (batch, *_) = WithoutLog(), loader(1)
    strategy = AxoSparseStrategy(stages, pipeline="backbone", transport="loopback")
    run = trainer(strategy, max_epochs=1, limit_train_batches=2)
    run.fit(module, loader(1))
    before, optimizer = module.head.weight.clone(), run.optimizers[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run.strategy.training_step(batch, 0)
        run.strategy.backward(loss, optimizer)
        return loss

    module.dropout.p = 0.0
    torch.testing.assert_close(closure(), module.loss(batch), rtol=0, atol=0)
    run.strategy.optimizer_step(optimizer, closure, module)
    assert not torch.equal(module.head.weight, before)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_checkpoint_is_loaded_after_the_run(stages: int) -> None:
    module = WithoutLog()
    strategy = AxoSparseStrategy(stages, pipeline="backbone", transport="loopback")
    run = trainer(strategy, max_epochs=1, limit_train_batches=2)
    run.fit(module, loader(1))
    (optimizer,) = run.optimizers
    saved = deepcopy(strategy.optimizer_state(optimizer))
    optimizer.state.clear()
    strategy.load_optimizer_state_dict({"optimizer_states": [saved]})
    torch.testing.assert_close(optimizer.state_dict(), saved, rtol=0, atol=0)
    assert saved["state"][0]["exp_avg"].any()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_checkpoint_without_optimizer_states_starts_optimizers_afresh(
    stages: int, tmp_path: Path
) -> None:
    def begun(epochs: int) -> Any:
        strategy = AxoSparseStrategy(stages, pipeline="backbone", transport="loopback")
        return trainer(strategy, max_epochs=epochs, limit_train_batches=2)

    run = begun(1)
    run.fit(WithoutLog(), loader(1))
    run.save_checkpoint(tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    torch.save({**saved, "optimizer_states": [], "lr_schedulers": []}, tmp_path / "stateless.ckpt")
    again = begun(2)
    again.fit(WithoutLog(), loader(1), ckpt_path=tmp_path / "stateless.ckpt")
    (optimizer,) = again.optimizers
    steps = [float(state["step"]) for state in optimizer.state.values()]
    assert steps
    assert set(steps) == {again.global_step - run.global_step}


class Failing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise LookupError("the user's own")
        return super().training_step(batch, batch_idx)


def test_a_checkpoint_of_an_exception_does_not_hide_it(tmp_path: Path) -> None:
    class Keeps(OnExceptionCheckpoint):
        def teardown(self, *_: Any, **__: Any) -> None:
            """Keep the file."""

    run = trainer(AxoSparseStrategy(), callbacks=[Keeps(tmp_path)], enable_checkpointing=True)
    with pytest.raises(LookupError, match="own"):
        run.fit(Failing(), loader(1))
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=False)["global_step"] == 3


# Real ranks: the samples of a batch on two replicas.


def half(rank: int) -> Any:
    """A loader of this replica's half of every batch."""
    batches = [tuple(part.chunk(2)[rank] for part in batch) for batch in loader(1)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


class WithoutDropout(TakesTurns):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()


def by_hand(strategy: Any, devices: int, data: Any) -> dict[str, Tensor]:
    module = WithoutDropout()
    run = trainer(strategy, devices, use_distributed_sampler=False)
    run.callbacks.pop(0)
    run.fit(module, data)
    return module.state_dict()


def on_two_ranks() -> dict[str, Tensor]:
    from mpi4py import MPI

    return by_hand(AxoSparseStrategy(), 2, half(MPI.COMM_WORLD.rank))


def test_two_ranks_optimize_by_hand() -> None:
    by_one = by_hand("auto", 1, loader(1))
    for state in run_ranks(2, on_two_ranks):
        torch.testing.assert_close(state, by_one)
