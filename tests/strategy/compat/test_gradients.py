"""Who may look at gradients before the optimizer and while they are cleared."""

from __future__ import annotations

import weakref
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.compat.gradients import (
    GradientNorms,
    clearing_is_seen,
    gradients_are_seen,
    pipeline_precision,
    restore_precision,
    scale_loss,
)
from tests.parity.cases import CLASSES, Net, loader, trainer
from tests.quiet import QUIET
from tests.ranks import run_ranks


class Clipping(Net):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class Hooked(Net):
    def on_after_backward(self) -> None: ...


class Watching(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None: ...


class Idle(Callback):
    def on_train_batch_end(self, *_: Any) -> None: ...


def prepared(module: L.LightningModule, **options: Any) -> L.Trainer:
    run = trainer(**options)
    run.strategy.connect(module)
    return run


@pytest.mark.parametrize(
    ("module", "options", "seen"),
    [
        (Net, {}, False),
        (Net, {"callbacks": [Idle()]}, False),
        (Net, {"callbacks": [Watching()]}, True),
        (Net, {"gradient_clip_val": 0.5}, True),
        (Net, {"precision": "bf16-mixed"}, False),
        (Clipping, {}, True),
        (Hooked, {}, True),
    ],
)
def test_what_counts(module: type[Net], options: dict[str, Any], seen: bool) -> None:
    assert gradients_are_seen(prepared(module(), **options)) is seen


def test_a_loss_scaler_counts() -> None:
    run = prepared(Net())
    run.precision_plugin.scaler = object()
    assert gradients_are_seen(run)


def test_callbacks_of_the_strategy_do_not_count() -> None:
    run = prepared(Net())
    gradients: Any = None  # They are not measured here.
    with GradientNorms(run, gradients, lambda: None).added_to(run):
        assert not gradients_are_seen(run)


class Cleared(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None: ...


class Clears(Callback):
    def on_before_zero_grad(self, *_: Any) -> None: ...


class OwnClearing(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None: ...


@pytest.mark.parametrize(
    ("module", "callbacks", "optimizer", "seen"),
    [
        (Net, [], torch.optim.SGD, False),
        (Net, [Watching()], torch.optim.SGD, False),
        (Cleared, [], torch.optim.SGD, True),
        (Net, [Clears()], torch.optim.SGD, True),
        (Net, [], OwnClearing, True),
    ],
)
def test_who_sees_gradients_being_cleared(
    module: type[Net], callbacks: list[Callback], optimizer: Any, seen: bool
) -> None:
    run = prepared(module(), callbacks=callbacks)
    run.strategy.optimizers = [optimizer(run.strategy.lightning_module.parameters(), lr=0.1)]
    assert clearing_is_seen(run) is seen


MICROBATCHES = 2
RUNS = [(1, "mean", MICROBATCHES), (2, "whole", 2 * MICROBATCHES + 2)]
"""Stages, how the loss is differentiated, and how often a step runs that is not compared."""


class InStep(Net):
    """Counts the gradients of the step before that still exist in each run of a step."""

    def __init__(self, alive: list[list[int]]) -> None:
        super().__init__()
        self.outside = nn.Parameter(torch.ones(CLASSES))  # in no optimizer
        self.note = lambda found: alive[-1].append(found)  # It changes nothing on the module.
        self.begin = lambda: alive.append([])
        self._gradients: list[Any] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note(sum(gradient() is not None for gradient in self._gradients))
        return nn.functional.cross_entropy(self(batch[0]) * self.outside, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self._gradients = [weakref.ref(p.grad) for p in self.model.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def fitted(strategy: Any, accumulated: int) -> tuple[InStep, list[list[int]]]:
    alive: list[list[int]] = []
    module = InStep(alive)
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    # These weights and steps are large: from batch to batch, rounding grows tenfold.
    double = {"precision": "64-true", "accumulate_grad_batches": accumulated}
    run = trainer(strategy, max_epochs=1, **double)
    run.fit(module, loader(1, batches=4))
    return module, alive


def pipeline(stages: int, loss: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(stages, MICROBATCHES, loss=loss, transport="loopback")


@pytest.mark.parametrize(("stages", "loss", "runs"), RUNS)
def test_gradients_of_the_last_step_are_freed_before_the_next(
    stages: int, loss: Any, runs: int
) -> None:
    module, alive = fitted(pipeline(stages, loss), 1)
    other, _ = fitted("auto", 1)
    assert alive[2] == runs * [0], "this batch is not compared"
    assert [found[-runs:] for found in alive] == 4 * [runs * [0]]
    assert module.outside.grad is not None  # It goes on growing, as nothing clears it.
    torch.testing.assert_close(module.outside.grad, other.outside.grad)


@pytest.mark.parametrize(("stages", "loss", "runs"), RUNS)
def test_accumulated_gradients_are_kept(stages: int, loss: Any, runs: int) -> None:
    module, alive = fitted(pipeline(stages, loss), 2)
    other, _ = fitted("auto", 2)
    weights = len(list(module.model.parameters()))
    assert alive[2] == runs * [0]
    assert [found[-runs:] for found in alive] == 2 * [runs * [0], runs * [weights]]
    torch.testing.assert_close(module.state_dict(), other.state_dict())


class UsersPrecision(MixedPrecision):
    """A user's own plugin."""


def scaled(**options: Any) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", **options)
    return MixedPrecision("16-mixed", "cpu", scaler)


def alone(plugin: Precision) -> Precision:
    pipeline_precision(plugin, None, None, lambda parameter: True, lambda: None)
    return plugin


@pytest.mark.parametrize(
    "plugin",
    [
        Precision(),
        DoublePrecision(),
        HalfPrecision("bf16-true"),
        MixedPrecision("bf16-mixed", "cpu"),
        UsersPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")),
    ],
    ids=lambda plugin: type(plugin).__name__,
)
def test_the_plugin_stays_what_it_was_by_name(plugin: Precision) -> None:
    kind = type(plugin)
    state = plugin.state_dict()
    assert alone(plugin) is plugin
    assert isinstance(plugin, kind)
    assert type(plugin) is not kind
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(plugin), name) == getattr(kind, name)
    assert plugin.state_dict() == state
    assert type(alone(plugin)).__mro__.count(kind) == 1
    assert len(type(plugin).__mro__) == len(kind.__mro__) + 3


def test_a_restored_plugin_has_its_own_classes_and_state() -> None:
    plugin = scaled(init_scale=8.0)
    kinds, attributes = (type(plugin), type(plugin.scaler)), set(vars(plugin))
    alone(plugin)
    scale_loss(plugin, torch.tensor(1.0))
    state = plugin.state_dict()
    restore_precision(plugin)
    restore_precision(plugin)
    assert (type(plugin), type(plugin.scaler)) == kinds
    assert set(vars(plugin)) == attributes
    assert plugin.state_dict() == state


def test_scale_loss() -> None:
    loss = torch.tensor(3.0)
    assert scale_loss(Precision(), loss) == 3.0
    assert scale_loss(MixedPrecision("bf16-mixed", "cpu"), loss) == 3.0
    assert scale_loss(alone(scaled(init_scale=8.0)), loss) == 24.0


class Regression(LightningModule):
    """The gradients of one step overflow in half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.explodes = batch_idx == 2

    def on_after_backward(self) -> None:
        if self.explodes:
            self.layer.weight.grad[0, 0] = torch.inf

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.scales.append(self.trainer.precision_plugin.state_dict().get("scale", 1.0))

    def configure_optimizers(self) -> Optimizer:
        return Adam(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), 8)


def train(plugin: Precision) -> tuple[Trainer, Regression]:
    module = Regression()
    trainer = Trainer(
        accelerator="cpu",
        plugins=[plugin],
        max_epochs=1,
        gradient_clip_val=0.5,
        **QUIET,
    )
    trainer.fit(module)
    return trainer, module


def test_training_with_a_scaler_and_clipping_equals_lightnings() -> None:
    trainer, expected = train(scaled(init_scale=16.0, growth_interval=2))
    ours, module = train(alone(scaled(init_scale=16.0, growth_interval=2)))
    assert expected.scales == [16.0, 16.0, 32.0, 16.0, 16.0]
    assert module.scales == expected.scales
    torch.testing.assert_close(module.state_dict(), expected.state_dict())
    checkpoints = [t._checkpoint_connector.dump_checkpoint() for t in (trainer, ours)]
    assert checkpoints[0]["MixedPrecision"] == checkpoints[1]["MixedPrecision"]


# Four real stages: one has no parameters, and the first and the last share one.

STAGES = (("first", "second", "shared"), (), ("third",), ("shared",))
CLIP_VALUES = (1e9, 1.0, 0.01)


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"first": (3, 2), "second": (5,), "shared": (2, 2), "third": (7,)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def optimizer_of(names: tuple[str, ...]) -> tuple[dict[str, nn.Parameter], Optimizer]:
    parameters = {name: nn.Parameter(torch.zeros_like(gradients()[name])) for name in names}
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["params"] = list(parameters.values())
    return parameters, optimizer


def clip_and_scale() -> tuple[Any, Any]:
    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    stage = dist.get_rank()
    parameters, optimizer = optimizer_of(STAGES[stage])
    counted = {id(p) for name, p in parameters.items() if (name, stage) != ("shared", 3)}
    plugin = scaled(init_scale=4.0, growth_interval=1)
    pipeline_precision(
        plugin,
        dist.group.WORLD,
        dist.group.WORLD,
        lambda parameter: id(parameter) in counted,
        lambda: None,
    )
    clipped = []
    for clip_value in CLIP_VALUES:
        set_gradients(parameters, gradients())
        plugin.clip_grad_by_norm(optimizer, clip_value)
        clipped.append(
            {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        )
    steps = []
    for overflow in (False, True, False):
        found = {name: 4.0 * gradient for name, gradient in gradients().items()}
        if overflow:
            found["third"] = found["third"] * torch.inf
        set_gradients(parameters, found)
        plugin.scaler.unscale_(optimizer)
        plugin.scaler.step(optimizer)
        plugin.scaler.update()
        values = {name: p.detach().clone() for name, p in parameters.items()}
        steps.append((plugin.scaler.get_scale(), values))
    return clipped, steps


def set_gradients(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        # As after a step in which a layer took no part.
        parameter.grad = None if name == "second" else values[name].clone()


def test_stages_clip_and_scale_as_one_process_does() -> None:
    expected_clipped = []
    names = ("first", "second", "shared", "third")
    for clip_value in CLIP_VALUES:
        parameters, _ = optimizer_of(names)
        set_gradients(parameters, gradients())
        torch.nn.utils.clip_grad_norm_(parameters.values(), clip_value)
        expected_clipped.append({n: p.grad for n, p in parameters.items() if p.grad is not None})
    for held, (clipped, steps) in zip(STAGES, run_ranks(4, clip_and_scale), strict=True):
        for ours, theirs in zip(clipped, expected_clipped, strict=True):
            assert ours.keys() == set(held) - {"second"}
            torch.testing.assert_close(ours, {name: theirs[name] for name in ours})
        # The second step overflows on one stage, so that none takes it.
        assert [scale for scale, _ in steps] == [8.0, 4.0, 8.0]
        for name in set(held) - {"second"}:
            first, second, third = (values[name] for _, values in steps)
            assert torch.equal(first, -gradients()[name])
            assert torch.equal(second, first)
            assert torch.equal(third, first - gradients()[name])
