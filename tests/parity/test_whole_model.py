"""What hooks ask all parameters for is that of the whole model on every rank, or it raises."""

from __future__ import annotations

import copy
import io
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, GradualPruning
from tests.parity.cases import FEATURES, Net, difference, fit, trainer
from tests.ranks import run_ranks


def present(parameters: Any) -> list[Tensor]:
    """The gradients that there are."""
    return [p.grad for p in parameters if p.grad is not None]


class Asking(Net):
    """Logs norms of gradients in three hooks, and clips them by hand."""

    def on_after_backward(self) -> None:
        self.log_dict(grad_norm(self, 1))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2) | grad_norm(self, "inf"))
        groups = [group["params"] for group in optimizer.param_groups]
        for number, group in enumerate(groups):
            self.log(f"parameters {number}", float(sum(p.numel() for p in group)))
            self.log(f"norm {number}", nn.utils.get_total_norm(present(group)))

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.optimizers()
        whole = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        assert whole == sum(p.numel() for p in self.parameters())

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        gradients = present(self.parameters())
        self.log("squares", sum(g.detach().data.norm(2).item() ** 2 for g in gradients))
        optimizer = self.optimizers()
        both = [p for group in optimizer.param_groups for p in group["params"]]
        self.log("before", nn.utils.clip_grad_norm_(both, 0.3))


class Partly(Asking):
    """A frozen layer and an unused parameter, which have no gradients."""

    def __init__(self) -> None:
        super().__init__(outer=True, tied=True)
        self.model[0].requires_grad_(False)
        self.model[5].unused = nn.Parameter(torch.ones(3))


class Penalized(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e-2 * sum(
            p.square().sum() for p in self.parameters()
        )


class Reading(Net):
    """Reads values after a step: what raises, and what all stages know together."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.raised, self.whole = [], {}
        for read in (self.weight_norm, self.gradient_norm, self.file):
            try:
                read()
            except RuntimeError as error:
                self.raised.append(str(error))
        parameters = getattr(self.trainer.strategy, "whole_parameters", self.named_parameters)()
        self.whole = {k: (p.detach().clone(), p.grad.clone()) for k, p in parameters}

    def weight_norm(self) -> float:
        return float(sum(p.norm() for p in self.parameters()))

    def gradient_norm(self) -> float:
        return float(sum(p.grad.norm() for p in self.parameters() if p.grad is not None))

    def file(self) -> None:
        torch.save(self.state_dict(), io.BytesIO())


class Taught(Net):
    """A dense teacher follows the student, whose weights are pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - self.teacher(batch[0]) + batch[1][:, None]).square().mean()

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        old = dict(self.teacher.named_parameters())
        for name, weight in self.trainer.strategy.whole_parameters():
            if name.startswith("model."):
                old[name.removeprefix("model.")].lerp_(weight, 0.1)
                assert weight.grad is None or weight.grad.shape == weight.shape


class Reversible(nn.Linear):
    def inverse(self, y: Tensor) -> Tensor:
        return (y - self.bias) @ self.weight


class Inverting(Net):
    """Uses its layers by another method than ``forward``, from the last one on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Reversible(FEATURES, FEATURES) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in reversed(self.model):
            x = layer.inverse(x)
        return x.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Call no layer."""


MODULES = {"asking": Asking, "partly": Partly}


def train(module: type[Net], strategy: Any, ranks: int = 1) -> Any:
    L.seed_everything(0, verbose=False)
    return fit(trainer(strategy, ranks, max_epochs=1, precision="64-true"), module())


def strategy(stages: int = 2, **options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(stages, microbatches=2, pipeline="model", **options)


def read(strategy: Any, ranks: int = 1) -> tuple[list[str], dict[str, Any]]:
    L.seed_everything(0, verbose=False)
    module = Reading()
    fit(trainer(strategy, ranks, max_epochs=1, precision="64-true"), module)
    return module.raised, module.whole


def taught(strategy: Any, ranks: int = 1) -> Any:
    prunes = GradualPruning(0.7, start=2, end=5, every=1, which={"teacher.*": False})
    L.seed_everything(0, verbose=False)
    settings = {"max_epochs": 1, "precision": "64-true", "callbacks": [prunes]}
    return fit(trainer(strategy, ranks, **settings), Taught())


def on_ranks() -> tuple[dict[str, Any], Any]:
    asked = {name: train(module, strategy(), 2) for name, module in MODULES.items()}
    asked["taught"] = taught(strategy(), 2)
    return asked, read(strategy(), 2)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(2, on_ranks)


@pytest.mark.parametrize("name", MODULES)
def test_norms_of_gradients_are_those_of_the_whole_model(name: str, ranks: list[Any]) -> None:
    expected = train(MODULES[name], "auto")
    names = {key for key in expected.logged[-1] if key.startswith("grad_2.0_norm/")}
    assert names >= {"grad_2.0_norm/model.2.weight", "grad_2.0_norm/model.5.bias"}
    for records, _ in ranks:
        assert difference(expected, records[name]) <= 1e-12


def test_what_is_not_known_raises_and_can_be_had(ranks: list[Any]) -> None:
    nothing, expected = read("auto")
    assert nothing == []
    for _, (raised, whole) in ranks:
        assert len(raised) == 3
        assert all("belongs to another stage of the pipeline" in error for error in raised)
        assert whole.keys() == expected.keys()
        for name, pair in expected.items():
            for ours, theirs in zip(whole[name], pair, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_dense_teacher_follows_weights_that_are_pruned(ranks: list[Any]) -> None:
    expected = taught(AxoSparseStrategy())
    assert (expected.weights["model.2.weight"] == 0).any()
    assert (expected.weights["teacher.2.weight"] != 0).all()
    for records, _ in ranks:
        assert difference(expected, records["taught"]) <= 1e-12


def test_a_layer_that_is_used_by_another_method_is_refused_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = r"^'model\.3\.\w+' belongs to another stage of the pipeline.* call each layer itself"
    with pytest.raises(RuntimeError, match=words):
        train(Inverting, strategy(), 2)
    assert "raised" not in "".join(capfd.readouterr()), "the batch has run again"


def test_a_penalty_in_the_loss_where_one_process_has_all_stages() -> None:
    ours = train(Penalized, strategy(transport="loopback"))
    assert difference(train(Penalized, "auto"), ours) <= 1e-12
