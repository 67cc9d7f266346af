"""Losses are differentiated once a batch, or by parts as the user declares."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline import step_front
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.pipeline.step_end import StepEnd
from lightning_axosparse.strategy.step.comparison import Comparison
from lightning_axosparse.strategy.step.learning import LoaderSteps, StepLearner
from tests.parity.cases import trainer

Step = Callable[["Net", Tensor, Tensor], Tensor]


class Net(L.LightningModule):
    """A network whose loss is given."""

    def __init__(self, loss: Step) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
        self.mean, self.given = MeanMetric(), loss
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.given(self, self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(samples: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, samples, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y), 8)


def train(
    step: Step, strategy: Any, samples: int = 32, max_epochs: int = 1, make: type[Net] = Net
) -> Net:
    L.seed_everything(0, verbose=False)
    module = make(step).double()
    run = trainer(strategy, precision="64-true", max_epochs=max_epochs, logger=False)
    run.fit(module, loader(samples))
    return module


def pipeline(**options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, 4, transport="loopback", **options)


def assert_equals_one_process(step: Step, make: type[Net] = Net, **options: Any) -> None:
    ours, theirs = train(step, pipeline(**options), make=make), train(step, "auto", make=make)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=1e-13)
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=0, atol=1e-13)


def mse(module: Net, z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


PARTS: dict[str, tuple[Any, Step]] = {
    "mean": ("mean", mse),
    "sum": ("sum", lambda m, z, y: F.mse_loss(z, y, reduction="sum") * 0.05),
    "noise of samples": ("mean", lambda m, z, y: F.mse_loss(z + torch.randn_like(z), y)),
    "dropout": ("mean", lambda m, z, y: F.mse_loss(F.dropout(z, 0.5), y)),
    "mapped": ("mean", lambda m, z, y: torch.func.vmap(F.mse_loss)(z, y).mean()),
    "a function of autograd": ("mean", lambda m, z, y: F.mse_loss(Doubled.apply(z), y)),
    "over its samples": ("mean", lambda m, z, y: F.mse_loss(z, y, reduction="sum") / len(z)),
    "mean of a mask": (lambda batch: (batch[1] > 0).sum(), lambda m, z, y: (z - y)[y > 0].mean()),
    "a shared number": (
        "mean",
        lambda m, z, y: F.mse_loss(z * random.random() * np.random.rand(), y),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_means_and_sums_equal_one_process(name: str) -> None:
    loss, step = PARTS[name]
    assert_equals_one_process(step, loss=loss)


WHOLE: dict[str, Step] = {
    "standardized": lambda m, z, y: F.mse_loss((z - z.mean(0)) / z.std(0), y),
    "half": lambda m, z, y: F.mse_loss(z[: len(z) // 2], y[: len(z) // 2]),
    "root": lambda m, z, y: F.mse_loss(z, y).sqrt(),
    "one": lambda m, z, y: F.mse_loss(z, y) / F.mse_loss(z, y).item(),
    "permuted": lambda m, z, y: F.mse_loss(z, y[torch.randperm(len(y))]),
    "numpy": lambda m, z, y: F.mse_loss(z, y) * np.random.rand(len(z)).mean(),
    "a mean and a sum": lambda m, z, y: F.mse_loss(z, y) + F.l1_loss(z, y, reduction="sum"),
    "two views": lambda m, z, y: F.mse_loss(*torch.cat([z, 2 * z]).chunk(2)),
    "other functions later": lambda m, z, y: (
        F.mse_loss(z - z.mean(0), y) if m.global_step == 2 else F.mse_loss(z, y)
    ),
    "a branch of the samples": lambda m, z, y: (
        z.square().mean() if (y > 1.5).any() else (z * y).mean()
    ),
}


DRAWN = ["noise of samples", "dropout", "mapped", "a function of autograd", "a shared number"]


@pytest.mark.parametrize("name", [*WHOLE, *DRAWN])
def test_by_default_every_loss_equals_one_process(name: str) -> None:
    assert_equals_one_process(WHOLE.get(name) or PARTS[name][1])


@pytest.mark.parametrize("name", ["standardized", "root", "permuted", "a mean and a sum"])
def test_a_declaration_that_is_not_right_is_refused(name: str) -> None:
    with pytest.raises(
        MisconfigurationException,
        match=r"loss='mean'\) is not right in training_step, training "
        r"epoch 0, batch 0: .*differ by",
    ):
        train(WHOLE[name], pipeline(loss="mean"))


def test_the_error_names_a_norm_outside_the_layers() -> None:
    class Normed(Net):
        def __init__(self, loss: Step) -> None:
            super().__init__(loss)
            self.norm = nn.BatchNorm1d(3)

    with pytest.raises(MisconfigurationException, match="'norm' normalizes by the statistics"):
        train(lambda m, z, y: mse(m, m.norm(z), y), pipeline(loss="mean"), make=Normed)


def test_a_declaration_that_is_not_right_later_is_refused_there() -> None:
    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, y) + (z.std(0).mean() if module.global_step == 3 else 0)

    with pytest.raises(MisconfigurationException, match=r"epoch 0, batch 3: "):
        train(step, pipeline(loss="mean"))


def test_a_loss_that_is_read_from_a_metric_is_refused() -> None:
    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, y) * module.mean(z.detach().abs())

    with pytest.raises(MisconfigurationException, match="the value of a metric"):
        train(step, pipeline(loss="mean"))
    assert_equals_one_process(step)


STEPS: dict[str, tuple[bool, Step]] = {
    "returns": (True, mse),
    "logs its loss": (True, lambda m, z, y: logging(m, loss := F.mse_loss(z, y), loss)),
    "logs it detached": (True, lambda m, z, y: logging(m, loss := F.mse_loss(z, y), loss.detach())),
    "logs its number": (False, lambda m, z, y: logging(m, loss := F.mse_loss(z, y), loss.item())),
    "logs another": (False, lambda m, z, y: logging(m, F.mse_loss(z, y), z.mean())),
    "changes it later": (
        False,
        lambda m, z, y: logging(m, loss := F.mse_loss(z, y), loss).add_(z.mean()),
    ),
    "draws": (False, lambda m, z, y: F.mse_loss(z * random.random(), y)),
    "prints": (False, lambda m, z, y: (m.print(""), F.mse_loss(z, y))[1]),
}


def logging(module: Net, loss: Tensor, value: Any) -> Tensor:
    module.log("value", value)
    return loss


@pytest.mark.parametrize("name", STEPS)
def test_only_the_end_of_a_step_that_does_more_runs_on_the_batch_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []

    def counted(end: StepEnd, *args: Any, **kwargs: Any) -> Any:
        ends.append(end)
        return run(end, *args, **kwargs)

    run = StepEnd.run
    monkeypatch.setattr(StepEnd, "run", counted)
    only_loss, step = STEPS[name]
    logs: list[Any] = []
    for strategy in (pipeline(loss="mean"), "auto"):
        module = train(step, strategy)
        logs.append({**module.trainer.callback_metrics, "losses": module.losses})
    torch.testing.assert_close(*logs, rtol=1e-6, atol=0, check_dtype=False)
    assert len(ends) == (0 if only_loss else 4)


@pytest.mark.parametrize("name", STEPS)
def test_on_one_stage_a_step_that_does_more_runs_whole(name: str) -> None:
    only_loss, step = STEPS[name]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = train(step, AxoSparseStrategy(1, 4, transport="loopback", loss="mean"))
    theirs = train(step, "auto")
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=1e-13)
    logs = [module.trainer.callback_metrics for module in (ours, theirs)]
    torch.testing.assert_close(*logs, rtol=1e-6, atol=0, check_dtype=False)
    assert any("batches pass as a whole" in str(w.message) for w in said) != only_loss


def test_a_batch_that_does_not_fit_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(comparison: Any, free: Any, *more: Any) -> Any:
        return compare(comparison, lambda: 0, *more)

    compare = Comparison.compare
    monkeypatch.setattr(Comparison, "compare", fits)
    assert_equals_one_process(mse, loss="mean")


def test_a_batch_that_has_to_run_whole_and_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_axosparse.strategy.states.free_bytes", lambda *_: 100)
    with pytest.raises(
        MisconfigurationException, match=r"3 micro-batches more.*recompute=.*'mean'"
    ):
        train(mse, pipeline())


def test_comparing_leaves_no_trace() -> None:
    seen = []

    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        module.mean.update(z.detach())
        loss = F.mse_loss(F.dropout(z, 0.5), y)
        module.log("loss", loss)
        return loss

    for strategy in (pipeline(), pipeline(loss="mean"), "auto"):
        module = train(step, strategy)
        numbers = torch.rand(()), random.random(), np.random.rand()
        seen.append((module.mean.compute(), module.losses, numbers))
    for mean, losses, numbers in seen:
        torch.testing.assert_close(mean, seen[-1][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(losses, seen[-1][1], rtol=0, atol=1e-13)
        assert numbers == seen[-1][2]


class Between(Net):
    """Draws behind some of its layers, from the third batch on, which is not compared."""

    behind: Collection[int] = range(9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for index, layer in enumerate(self.model):
            x = layer(x)
            if batch_idx > 1 and index in self.behind:
                x = x * random.random() + np.random.randn() + torch.rand(())
        return self.given(self, x, batch[1])


class InLastStage(Between):
    behind = (2,)


class BehindLayers(Between):
    behind = (3,)


@pytest.mark.parametrize("loss", ["whole", "mean"])
@pytest.mark.parametrize("net", [Between, InLastStage, BehindLayers])
def test_code_between_layers_draws_what_one_process_draws(net: type[Net], loss: str) -> None:
    assert_equals_one_process(mse, net, loss=loss)


def fixed_noise(module: Net, x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)


def own_noise(module: Net, x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=module.generator, dtype=x.dtype)


def forked_noise(module: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.randn_like(x)


class Noise(Between):
    """Adds noise for each sample that leaves no trace in global generators."""

    noise: Any = None
    first = 0

    def __init__(self, loss: Step) -> None:
        super().__init__(loss)
        self.generator = torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for index, layer in enumerate(self.model):
            x = layer(x)
            if batch_idx >= self.first and index in self.behind:
                x = x + type(self).noise(self, x)
        return self.given(self, x, batch[1])


@pytest.mark.parametrize("loss", ["whole", "mean"])
@pytest.mark.parametrize("behind", [2, 3])
@pytest.mark.parametrize("noise", [fixed_noise, own_noise, forked_noise])
def test_noise_of_other_generators_is_that_of_one_process(
    noise: Callable[[Net, Tensor], Tensor], behind: int, loss: str
) -> None:
    for first in (0, 2):  # The first batch is compared, the third is not.
        net = type("Net", (Noise,), {"noise": noise, "behind": (behind,), "first": first})
        assert_equals_one_process(mse, net, loss=loss)


class Residual(Net):
    """Adds the output of an earlier layer, from a batch on that is compared, or is not."""

    def __init__(self, loss: Step, first: int, source: int) -> None:
        super().__init__(loss)
        self.first, self.source = first, source

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = [batch[0]]
        for layer in self.model:
            outputs.append(layer(outputs[-1]))
        residual = outputs[self.source].sin() if batch_idx >= self.first else 0
        return self.given(self, outputs[-1] + residual, batch[1])


@pytest.mark.parametrize("loss", ["whole", "mean"])
@pytest.mark.parametrize("source", [1, 3], ids=["of the first stage", "of the last stage"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_value_that_later_batches_read_is_sent_then(first: int, source: int, loss: str) -> None:
    net: Any = partial(Residual, first=first, source=source)
    assert_equals_one_process(mse, net, loss=loss)


class BranchingLate(Net):
    """Takes a branch by a number of a value between layers, in a batch that is not compared."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.model:
            x = layer(x)
            if batch_idx == 2 and x[:, 0].mean() > 0:
                x = 2 * x
        return self.given(self, x, batch[1])


@pytest.mark.parametrize("loss", ["whole", "mean"])
def test_a_number_that_a_later_batch_reads_first_is_that_of_the_batch(loss: str) -> None:
    assert_equals_one_process(mse, BranchingLate, loss=loss)


def penalized(module: Net, z: Tensor, y: Tensor) -> Tensor:
    """Differentiate code behind the layers by its input; it prints, so it runs on the batch too."""
    x = z.detach().requires_grad_()
    (slope,) = torch.autograd.grad((module.weight * x).tanh().sum(), x, create_graph=True)
    module.print("", end="")
    return F.mse_loss(z, y) + slope.square().sum(1).mean()


def with_own_backward(module: Net, z: Tensor, y: Tensor) -> Tensor:
    module.print("", end="")
    (module.weight * z.detach()).mean().backward()
    return (module.weight * F.mse_loss(z, y)).sum()


class Weighted(Net):
    def __init__(self, loss: Step) -> None:
        super().__init__(loss)
        self.weight = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("loss", ["whole", "mean"])
@pytest.mark.parametrize("step", [penalized, with_own_backward])
def test_a_step_may_run_a_backward_pass_behind_the_layers(step: Step, loss: str) -> None:
    assert_equals_one_process(step, Weighted, loss=loss)


def test_a_step_that_draws_for_the_batch_alone_is_not_by_parts() -> None:
    class OnTheBatch(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.print("")
            if batch_idx == 2 and len(batch[0]) == 8:
                random.random()
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match=r"unlike on its parts, .* draws .*'whole'"):
        train(mse, pipeline(loss="mean"), make=OnTheBatch)


class Centered(nn.Module):
    """Subtracts the mean over samples, from the n-th call on that counts."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.calls, self.first = 0, first

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x - x.mean(0) if self.calls > self.first else x


class WithStatistics(Net):
    def __init__(self, loss: Step, layer: nn.Module | None = None) -> None:
        super().__init__(loss)
        self.model.insert(1, layer or Centered())


@pytest.mark.parametrize("loss", ["whole", "mean"])
def test_layers_that_compare_samples_leave_batches_undivided(loss: Any) -> None:
    words = r"epoch 0, batch 0, .*'model\.0' to 'model\.2' gives something .*as one micro-batch"
    with pytest.warns(UserWarning, match=words):
        assert_equals_one_process(mse, WithStatistics, loss=loss)


def test_a_step_that_needs_a_graph_is_compared() -> None:
    class Retaining(WithStatistics):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = self.model(batch[0])
            z.retain_grad()
            return self.given(self, z, batch[1])

    with pytest.warns(UserWarning, match="as one micro-batch"):
        assert_equals_one_process(mse, Retaining)


def test_a_layer_that_changes_a_list_that_it_is_given_is_refused() -> None:
    class Appending(nn.Module):
        def forward(self, x: Tensor, aux: Any) -> Tensor:
            if isinstance(aux, dict):
                aux["sum"] = aux.get("sum", 0) + x.mean()
            else:
                aux.append(x.mean())
            return x

    class Collecting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.model[0](batch[0])
            return self.given(self, self.model[2](self.model[1](x, self.aux)), batch[1])

    for aux in ([], {}):
        module = Collecting(mse)
        module.model = nn.Sequential(nn.Linear(3, 3), Appending(), nn.Linear(3, 3))
        module.aux = aux
        run = trainer(pipeline(), precision="64-true", max_epochs=1)
        with pytest.raises(MisconfigurationException, match=r"'model\.1' changes a (list|dict)"):
            run.fit(module.double(), loader(8))


def test_replicas_that_share_experts_do_not_wait_for_an_undivided_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepLearner, "_where", lambda learner, step: step.step.__name__)
    run = SimpleNamespace(
        effects=SimpleNamespace(begin_batch=lambda: None),
        stage_module=SimpleNamespace(groups=SimpleNamespace(experts=object())),
    )
    learner = StepLearner(L.Trainer(accelerator="cpu", logger=False), None, lambda: 0, 0.0)
    step = SimpleNamespace(step=Net.training_step, failures=[])
    learner.run_again(run, LoaderSteps(), step, Rerun.DRAWS)
    with pytest.raises(MisconfigurationException, match=r"cannot be divided in training_step"):
        learner.run_again(run, LoaderSteps(), step, Rerun.SAMPLES)


def test_the_first_batches_that_are_divided_are_compared() -> None:
    class Validated(WithStatistics):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx))

    data = DataLoader(TensorDataset(*loader(12).dataset.tensors), 5)
    losses = []
    for strategy in (AxoSparseStrategy(2, 2, transport="loopback"), "auto"):
        L.seed_everything(0, verbose=False)
        run = trainer(strategy, precision="64-true", logger=False)
        losses.append(run.validate(Validated(mse).double(), data, verbose=False)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_layers_that_compare_samples_later_are_refused_with_epoch_and_batch() -> None:
    module = WithStatistics(mse, Centered(first=1)).double()
    with pytest.raises(MisconfigurationException, match=r"epoch 0, batch 1, .*Earlier batches"):
        trainer(pipeline(), precision="64-true", max_epochs=1).fit(module, loader(32))


class OfEight(nn.Module):
    """A layer of which the number of samples is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(8, 3).tanh()


@pytest.mark.parametrize("loss", ["whole", "mean"])
@pytest.mark.parametrize("place", ["in a layer", "before"])
def test_a_batch_of_which_a_micro_batch_fails_runs_undivided(loss: Any, place: str) -> None:
    class Failing(Net):
        def __init__(self, loss: Step) -> None:
            super().__init__(loss)
            if place == "in a layer":
                self.model.insert(2, OfEight())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            if place == "before":
                x = x.view(8, 3)
            return self.given(self, self.model(x), y)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_equals_one_process(mse, Failing, loss=loss)
    texts = [str(w.message) for w in said if "on one of 4 micro-batches, raised" in str(w.message)]
    (text,) = texts
    assert "RuntimeError: shape '[8, 3]' is invalid" in text


def test_only_some_batches_run_undivided() -> None:
    """Layers want batches of at least two samples, and the last batch has fewer for each part."""

    class Pairs(Net):
        def __init__(self, loss: Step) -> None:
            super().__init__(loss)
            self.sizes: list[int] = []
            self.model[3].register_forward_hook(lambda m, a, output: self.sizes.append(len(output)))
            self.model[3].register_forward_pre_hook(self.check)

        def check(self, layer: nn.Module, args: tuple[Tensor]) -> None:
            if len(args[0]) < 2:
                raise IndexError("of one sample")

    module = train(mse, pipeline(), samples=8 + 8 + 5, make=Pairs)
    assert module.sizes[-1] == 5
    assert max(module.sizes[:-1]) == 8, "that of a comparison"
    theirs = train(mse, "auto", samples=8 + 8 + 5, make=Pairs)
    torch.testing.assert_close(module.losses, theirs.losses, rtol=0, atol=1e-13)


class Branching(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if (x > -1.5).all():
            x = 2 * x
        return self.given(self, self.model(x), y)


@pytest.mark.parametrize("loss", ["whole", "mean"])
def test_micro_batches_take_the_branch_of_the_batch(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = []
    monkeypatch.setattr(step_front, "RunAgain", lambda why: (reasons.append(why), RunAgain(why))[1])
    module = train(mse, pipeline(loss=loss), samples=64, make=Branching)
    theirs = train(mse, "auto", samples=64, make=Branching)
    torch.testing.assert_close(module.losses, theirs.losses, rtol=0, atol=1e-13)
    assert set(reasons) == {Rerun.MIXES}


@pytest.mark.parametrize("loss", ["whole", "mean"])
def test_an_error_that_the_undivided_batch_raises_is_raised(loss: Any) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(mse, pipeline(loss=loss), make=Failing)


def test_backward_hooks_inside_layers_are_named() -> None:
    class Hooked(Net):
        def __init__(self, loss: Step) -> None:
            super().__init__(loss)
            self.model[1][0].register_full_backward_hook(lambda *args: None)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(pipeline(), precision="64-true", max_epochs=1).fit(Hooked(mse).double(), loader(8))
    assert any("Backward hooks of 'model.1.0'" in str(w.message) for w in said)


def test_batches_that_are_compared() -> None:
    known = LoaderSteps()
    due = [n for n in range(1, 41) if known.begin_batch(begins_epoch=False)]
    assert due == [1, 2, 4, 8, 16, 32]
    known = LoaderSteps()
    due = [n for n in range(1, 41) if known.begin_batch(begins_epoch=n % 5 == 1)]
    assert due == [1, 2, 4, 8, 16, 26, 32]  # Of short epochs some first batches.
