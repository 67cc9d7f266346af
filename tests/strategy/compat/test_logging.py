from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
)
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.compat.logging import LogCall, StepLog, alike, of_batch, with_loss
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks
from tests.strategy.compat.harness import Moments, assert_same, fit
from tests.strategy.compat.module import LogsEverything


class Results(_ResultCollection):
    """Keeps what reaches it."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self.heard: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        super().log(fx, name, value, **options)
        self.heard.append((name, value, options))


class Listener(LightningModule):
    """In the middle of a step that logs."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.scores = MetricCollection({"score": MeanMetric()})
        self.results = Results()
        self._trainer: Any = SimpleNamespace(
            _results=self.results,
            barebones=False,
            training=True,
            logger=None,
            strategy=SimpleNamespace(reduce=None),
            _accelerator_connector=SimpleNamespace(is_distributed=False),
            _logger_connector=SimpleNamespace(should_reset_tensors=lambda fx: False),
        )
        self._current_fx_name = "training_step"

    @property
    def heard(self) -> list[tuple[str, float]]:
        return [(name, float(value)) for name, value, _ in self.results.heard]


OPTIONS = {"reduce_fx": "mean", "batch_size": None, "metric_attribute": None}


def logged(name: str, value: Any, **options: Any) -> LogCall:
    return LogCall(name, torch.tensor(value), {**OPTIONS, **options})


def without_metrics(moments: Moments) -> Moments:
    """What is not rounded by torchmetrics, whose states are in single precision."""
    names = ("loss", "a", "b", "largest", "smallest", "chosen", "double", "val_loss", "own_name")
    kept = [name + suffix for name in names for suffix in ("", "_step", "_epoch", "_0")]
    return [(at, {n: v for n, v in seen.items() if n in kept}) for at, seen in moments]


@pytest.fixture
def module() -> Listener:
    return Listener()


@pytest.fixture
def log(module: Listener) -> StepLog:
    return StepLog(module, lambda action: None)


def loopback(microbatches: int) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, microbatches, pipeline="net", transport="loopback")


@pytest.mark.parametrize("microbatches", [1, 3, 11])
def test_everything_logged_equals_one_process(microbatches: int) -> None:
    theirs = fit(LogsEverything(), "auto", precision="64-true")
    ours = fit(LogsEverything(), loopback(microbatches), precision="64-true")
    assert_same(ours, theirs)
    assert_same(without_metrics(ours), without_metrics(theirs), relative=1e-12)
    assert {"train_batch.callback_metrics", "fit.logged_metrics", "logger"} <= {
        moment for moment, _ in theirs
    }


def test_a_step_that_predicts_cannot_log() -> None:
    class LogsPredictions(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("name", 1.0)
            return super().predict_step(batch, batch_idx)

    strategy = AxoSparseStrategy(2, 4, pipeline="model", transport="loopback")
    with pytest.raises(MisconfigurationException, match="predict"):
        trainer(strategy).predict(LogsPredictions(), loader(1, batches=1))


@pytest.mark.parametrize(
    ("positional", "named"),
    [((), {"prog_barr": True}), ((True,), {"prog_bar": True})],
    ids=["unknown", "twice"],
)
def test_options_that_do_not_fit_are_an_error_of_the_users_line(
    positional: tuple[bool, ...], named: dict[str, bool]
) -> None:
    class LogsWrongly(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self(batch[0])
            self.log("name", 1.0, *positional, **named)
            raise AssertionError("It was logged.")

    strategy = AxoSparseStrategy(2, 4, pipeline="model", transport="loopback")
    with pytest.raises(TypeError, match="prog_bar"):
        trainer(strategy).fit(LogsWrongly(), loader(1, batches=1))


def test_the_loss_of_the_batch_replaces_those_of_micro_batches() -> None:
    parts = [[logged("a", value), logged("b", value, batch_size=2)] for value in (1.0, 2.0, 3.0)]
    one, other = with_loss(parts, torch.tensor(2.5, requires_grad=True))
    assert (one.name, float(one.value), one.options["batch_size"]) == ("a", 2.5, None)
    assert (other.name, float(other.value), other.options["batch_size"]) == ("b", 2.5, 6)
    assert not one.value.requires_grad


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([logged("a", 2.0, batch_size=3)], True),
        ([logged("b", 1.0, batch_size=2)], False),
        ([logged("a", 1.0)], False),
        ([logged("a", 1.0, batch_size=2, reduce_fx="max")], False),
        ([], False),
    ],
)
def test_micro_batches_that_log_the_same_are_alike(others: Any, expected: bool) -> None:
    assert alike([logged("a", 1.0, batch_size=2)], others) == expected


def test_it_knows_whether_only_the_loss_was_logged(module: Listener, log: StepLog) -> None:
    for logs, expected in {
        lambda loss: module.log("a", loss): True,
        lambda loss: module.log_dict({"a": loss, "b": loss.detach()}): True,
        lambda loss: module.log("a", loss * 2): False,
        lambda loss: module.log("a", loss.item()): False,
        lambda loss: (module.log("a", loss), loss.mul_(2)): False,
        lambda loss: (module.log("a", loss), module.log("b", 0.5)): False,
        lambda loss: None: True,
    }.items():
        loss = torch.ones(3, requires_grad=True).mean()
        with log.recorded():
            logs(loss)
        assert log.logs_only(loss) == expected


def test_a_step_that_is_cut_short_is_forgotten_by_the_next(module: Listener, log: StepLog) -> None:
    with suppress(KeyError), log.recorded():
        module.log("name", 1.0)
        raise KeyError
    with log.recorded():
        pass
    assert log.calls == []
    module.log("outside", 2.0)
    assert module.heard == [("outside", 2.0)]


def test_attributes_of_the_same_names_are_put_back(module: Listener, log: StepLog) -> None:
    vars(module).update(log=len, print=repr)
    with log.recorded(), log.ignored():
        pass
    assert (vars(module)["log"], vars(module)["print"]) == (len, repr)


def test_an_override_runs_once(module: Listener, log: StepLog) -> None:
    class Prefixed(Listener):
        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(f"own/{name}", value, **options)

    module = Prefixed()
    log = StepLog(module, lambda action: None)
    with log.recorded():
        module.log("name", 1.0)
    log.replay(log.calls)
    assert module.heard == [("own/name", 1.0)]


def test_values_are_detached_copies(module: Listener, log: StepLog) -> None:
    value = torch.ones((), requires_grad=True)
    with log.recorded():
        module.log("name", value, enable_graph=True)
    with torch.no_grad():
        value.mul_(7)
    (call,) = log.calls
    assert call.value == 1
    assert not call.value.requires_grad
    assert call.options["enable_graph"] is True


def test_lightning_checks_a_call_once_a_batch(module: Listener, log: StepLog) -> None:
    def calls_of(value: Any, **options: Any) -> LogCall:
        with log.recorded():
            module.log("name", value, **options)
        (call,) = log.calls
        return call

    to_tensor: Any = vars(LightningModule)["_LightningModule__to_tensor"]
    checked: list[str] = []
    with patch.object(LightningModule, "_LightningModule__to_tensor") as check:
        check.side_effect = lambda *given: checked.append(given[1]) or to_tensor(module, *given)
        values = [torch.ones(1, requires_grad=True) * number for number in (1, 2, 3)]
        first, second = calls_of(values[0], on_epoch=True), calls_of(values[1], on_epoch=True)
        assert len(checked) == 1
        assert second == first._replace(value=torch.tensor(2.0))
        assert second.value.shape == first.value.shape == ()
        assert not second.value.requires_grad
        assert calls_of(values[2]).options != first.options
        calls_of(2.0, on_epoch=True)
        log.begin_batch()
        calls_of(values[0], on_epoch=True)
    assert len(checked) == 4


def test_a_default_is_no_request_for_a_logger(module: Listener, log: StepLog) -> None:
    with log.recorded():
        module.log("name", 1.0)
        module.log("other", 1.0, logger=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.replay(log.calls)
    assert [options["logger"] for *_, options in module.results.heard] == [True, False]


@pytest.mark.parametrize(
    ("value", "options", "error", "message"),
    [
        (1.0, {"reduce_fx": torch.std}, MisconfigurationException, "reduce_fx"),
        (1.0, {"sync_dist_group": "g"}, MisconfigurationException, "sync_dist_group"),
        (torch.ones(3), {}, ValueError, "must have a single element"),
        ("high", {}, ValueError, "`str` values"),
        (MeanMetric(), {}, MisconfigurationException, "name"),
    ],
)
def test_refused(
    module: Listener,
    log: StepLog,
    value: Any,
    options: dict,
    error: type[Exception],
    message: str,
) -> None:
    def recorded_and_replayed() -> None:
        with log.recorded():
            module.log("name", value, **options)
        log.replay(log.calls)

    with pytest.raises(error, match=message):
        recorded_and_replayed()


# What micro-batches print is printed once, as on one process.


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("before", batch_idx, sep="-")
        loss = super().training_step(batch, batch_idx)
        self.print("behind", end="!\n")
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("predicts", flush=True)
        return super().predict_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.print("epoch")


def printed(strategy: Any, ranks: int = 1, module: type[Net] = Printing) -> list[str]:
    out = io.StringIO()
    with redirect_stdout(out):
        run, net = trainer(strategy, ranks, max_epochs=1), module()
        run.fit(net, loader(1, batches=2))
        run.predict(net, loader(1, batches=1), return_predictions=False)
    kinds = "before", "behind", "predicts", "epoch"
    return [line for line in out.getvalue().splitlines() if line.startswith(kinds)]


def pipeline(**options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, 4, pipeline="model", **options)


EXPECTED = ["before-0", "behind!", "before-1", "behind!", "epoch", "predicts"]


def test_it_prints_what_one_process_prints() -> None:
    assert printed("auto") == EXPECTED
    assert printed(pipeline(transport="loopback")) == EXPECTED


def on_ranks() -> list[str]:
    return printed(pipeline(), 2)


def test_the_first_rank_prints_for_all() -> None:
    assert run_ranks(2, on_ranks) == [EXPECTED, []]


class Failing(Printing):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        raise OverflowError


def test_what_was_printed_before_an_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OverflowError):
        trainer(pipeline(transport="loopback")).fit(Failing(), loader(1))
    assert capsys.readouterr().out.endswith("before-0\nbehind!\n")


class ToFile(Printing):
    file: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("behind", file=self.file)
        return super().training_step(batch, batch_idx)


def test_it_prints_into_files_of_the_user() -> None:
    module = ToFile()
    module.file = io.StringIO()
    run = trainer(pipeline(transport="loopback"), max_epochs=1)
    run.fit(module, loader(1, batches=2))
    assert module.file.getvalue() == "behind\nbehind\n"


@pytest.mark.parametrize(
    ("by", "expected"),
    [("mean", 2.5), (torch.mean, 2.5), ("avg", 2.5), (sum, 4.0), ("sum", 4.0), ("MAX", 3.0)],
)
def test_replicas_that_have_parts_of_a_batch_log_that_of_the_batch(by: Any, expected: Any) -> None:
    def calls(value: float, size: int | None, other: str = "other") -> list[LogCall]:
        options = {"metric_attribute": None, "reduce_fx": by, "sync_dist": False}
        tensor = torch.tensor(value, dtype=torch.float64)
        return [LogCall(n, tensor, {**options, "batch_size": size}) for n in ("name", other)]

    parts = [(calls(1.0, 1), 0.5), (calls(3.0, 3, "another")[::-1], 1.5)]
    first, second = of_batch(parts[0][0], parts, (1, 4), 1)
    assert first.value == expected
    assert first.value.dtype == torch.float64
    assert first.options["batch_size"] == 4
    assert (second.value, second.options["batch_size"]) == (1.0, 4)
    synchronized = [c._replace(options={**c.options, "sync_dist": True}) for c in parts[0][0]]
    (summed, _) = of_batch(synchronized, parts, (1, 4), 2)
    assert summed.value == expected / (2 if by in (sum, "sum") else 1)


@pytest.mark.parametrize(("sizes", "expected"), [((2, 3), 5), ((1, 1), 1), ((40, 70), 110)])
def test_the_size_of_a_batch_is_its_samples_or_a_constant(
    sizes: tuple[int, int], expected: int
) -> None:
    options = {"metric_attribute": None, "reduce_fx": "mean", "sync_dist": False}
    parts = [
        ([LogCall("name", torch.ones(()), {**options, "batch_size": size})], 1.0) for size in sizes
    ]
    (call,) = of_batch(parts[0][0], parts, (2, 5), 1)
    assert call.options["batch_size"] == expected
