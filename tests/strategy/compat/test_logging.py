from __future__ import annotations

import inspect
import io
import math
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MetricCollection

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline.loss.combination import Rule
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker
from lightning_axosparse.strategy.compat.logging import LoggedValue, MicrobatchLog
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks
from tests.strategy.compat.harness import CutStrategy, History, alone, assert_same, fit
from tests.strategy.compat.module import LogsEverything


class Listener(LightningModule):
    """Keeps the calls that reach its own ``log``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.metric = MeanMetric()
        self.scores = MetricCollection({"mean": MeanMetric()})

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        self.calls.append((name, value, options))


class Extremes(CatMetric):
    """Has several values."""

    def compute(self) -> dict[str, Tensor]:
        values = super().compute()
        return {"low": values.min(), "high": values.max()}


def attached(module: LightningModule) -> MicrobatchLog:
    log = MicrobatchLog(module, ReductionTracker())
    module.undo = ExitStack()
    module.undo.enter_context(log.attached())
    return log


def record(
    module: Listener, log: MicrobatchLog, size: int, *calls: tuple[Any, dict[str, Any]]
) -> None:
    with log.microbatch(size):
        for value, options in calls:
            module.log("name", value, **options)


def without_metrics(history: History) -> list[dict[str, float]]:
    names = ("loss", "a", "b", "largest", "smallest", "chosen", "double", "val_loss", "own_name")
    kept = [name + suffix for name in names for suffix in ("", "_step", "_epoch", "_0")]
    return [{n: v for n, v in seen.items() if n in kept} for _, seen in history.moments]


@pytest.fixture
def module() -> Listener:
    return Listener()


@pytest.fixture
def log(module: Listener) -> MicrobatchLog:
    return attached(module)


@pytest.mark.parametrize("microbatches", [1, 3, 11])
def test_everything_logged_equals_one_process(microbatches: int) -> None:
    theirs = fit(LogsEverything(), "auto")
    ours = fit(LogsEverything(), CutStrategy(microbatches, alone()))
    assert_same(ours.moments, theirs.moments)
    assert {"train_batch.callback_metrics", "fit.logged_metrics", "logger"} <= {
        moment for moment, _ in theirs.moments
    }


def test_double_precision_stays_double() -> None:
    theirs = fit(LogsEverything(), "auto", plugins=[DoublePrecision()])
    strategy = CutStrategy(4, alone())
    ours = fit(LogsEverything(), strategy, plugins=[DoublePrecision()])
    # torchmetrics' own states stay single precision.
    pairs = zip(without_metrics(ours), without_metrics(theirs), strict=True)
    for mine, reference in pairs:
        assert mine == pytest.approx(reference, rel=1e-14)


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
            self.log("name", 1.0, *positional, **named)
            raise AssertionError("It was logged.")

    strategy = AxoSparseStrategy(2, 4, pipeline="model", transport="loopback")
    with pytest.raises(TypeError, match="prog_bar"):
        trainer(strategy).fit(LogsWrongly(), loader(1, batches=1))


def test_early_stopping_stops_at_the_same_epoch() -> None:
    stops = []
    for strategy in ("auto", CutStrategy(3, alone())):
        stop = EarlyStopping("val_loss/dataloader_idx_0", patience=1, min_delta=0.005)
        fit(LogsEverything(), strategy, [stop], max_epochs=20)
        stops.append((stop.stopped_epoch, float(stop.best_score)))
    assert 0 < stops[0][0] < 19
    assert stops[1] == pytest.approx(stops[0], rel=1e-6)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=8)
)
def test_reductions(microbatches: list[tuple[int, float]]) -> None:
    values = torch.tensor([value for _, value in microbatches], dtype=torch.float64)
    sizes = torch.tensor([size for size, _ in microbatches], dtype=torch.float64)
    expected = {
        "mean": (values * sizes).sum() / sizes.sum(),
        "sum": values.sum(),
        "min": values.min(),
        "max": values.max(),
    }
    for reduction, value in expected.items():
        module = Listener()
        log = attached(module)
        for size, logged in microbatches:
            record(module, log, size, (torch.tensor(logged), {"reduce_fx": reduction}))
        (combined,) = log.combine()
        assert combined.value.dtype == torch.float32
        torch.testing.assert_close(combined.value.double(), value, rtol=1e-5, atol=1e-3)
        assert "batch_size" not in combined.options


def followed(
    step: Callable[[LightningModule, Tensor], None],
    sizes: list[int],
    rules: dict[tuple[str, int], Rule | None] | None = None,
) -> LoggedValue:
    """What a step that logs once makes of a batch of 0, 1, 2, ..."""
    module, tracker = Listener(), ReductionTracker([SCALES])
    log = MicrobatchLog(module, tracker)
    for part in torch.arange(float(sum(sizes))).split(sizes):
        with log.attached(), tracker.microbatch(len(part)), log.microbatch(len(part)):
            with torch.no_grad():
                step(module, part)
    (combined,) = log.combine(rules=rules or {})
    return combined


SCALES = torch.tensor([1.0, 2.0])
LOGGED: dict[str, tuple[Callable[[LightningModule, Tensor], None], float]] = {
    "penalty": (lambda m, x: m.log("a", SCALES.sum()), 3),
    "penalty, added up": (lambda m, x: m.log("a", SCALES.sum(), reduce_fx="sum"), 3),
    "a mean": (lambda m, x: m.log("a", x.mean()), 2),
    "its number": (lambda m, x: m.log("a", x.mean().item()), 2),
    "root": (lambda m, x: m.log("a", x.pow(2).mean().sqrt()), 6**0.5),
    "exponential": (lambda m, x: m.log("a", x.mean().exp()), math.exp(2)),
    "ratio of counts": (lambda m, x: m.log("a", (x > 1).sum() / (x < 4).sum()), 3 / 4),
    "a given weight": (lambda m, x: m.log("a", len(x) * 1.5, batch_size=1), 3.75),
    "learning rate": (lambda m, x: m.log("a", 0.25), 0.25),
    "largest": (lambda m, x: m.log("a", x.max(), reduce_fx="max"), 4),
}


@pytest.mark.parametrize("name", LOGGED)
def test_what_is_known_of_a_number_without_a_comparison(name: str) -> None:
    step, value = LOGGED[name]
    combined = followed(step, [3, 2])
    torch.testing.assert_close(combined.value, torch.tensor(float(value)))


RULED: dict[str, tuple[Callable[[LightningModule, Tensor], None], Rule, float]] = {
    "samples": (lambda m, x: m.log("a", len(x)), "sum", 5),
    "largest": (lambda m, x: m.log("a", x.max()), "max", 4),
    "a number a sample": (lambda m, x: m.log("a", x.sum().item() / len(x)), "samples", 2),
}


@pytest.mark.parametrize("name", RULED)
def test_a_rule_says_how_numbers_combine(name: str) -> None:
    step, rule, value = RULED[name]
    combined = followed(step, [3, 2], {("a", 1): rule})
    torch.testing.assert_close(combined.value, torch.tensor(float(value)))


def test_given_batch_sizes_weigh_and_add_up(module: Listener, log: MicrobatchLog) -> None:
    record(module, log, 5, (1.0, {"batch_size": 30}))
    record(module, log, 5, (2.0, {"batch_size": 10}))
    record(module, log, 5, (torch.tensor(torch.nan), {"batch_size": 0}))
    (combined,) = log.combine()
    assert combined.value == 1.25
    assert combined.options["batch_size"] == 40


def test_a_name_logged_twice_in_a_step_stays_two_calls(
    module: Listener, log: MicrobatchLog
) -> None:
    record(module, log, 1, (1.0, {}), (10.0, {}))
    record(module, log, 1, (3.0, {}), (30.0, {}))
    assert [float(combined.value) for combined in log.combine()] == [2.0, 20.0]


def test_a_step_that_is_cut_short_leaves_nothing(module: Listener, log: MicrobatchLog) -> None:
    with suppress(KeyError), log.microbatch(1):
        module.log("name", 1.0)
        raise KeyError
    assert log.combine() == []
    module.log("outside", 2.0)
    assert module.calls == [("outside", 2.0, {})]


def test_replay_brings_metrics_by_their_path(module: Listener, log: MicrobatchLog) -> None:
    with log.microbatch(2):
        module.metric(torch.tensor([1.0, 2.0]))
        module.log("mean", module.metric, prog_bar=True)
        module.scores(torch.tensor([5.0]))
        module.log_dict(module.scores, on_epoch=True)
    values = pickle.loads(pickle.dumps(log.combine()))
    assert [(value.metric, float(value.value)) for value in values] == [
        ("metric", 1.5),
        ("scores.mean", 5.0),
    ]

    elsewhere = Listener()
    MicrobatchLog(elsewhere, ReductionTracker()).replay(values)
    (_, metric, options), (_, member, _) = elsewhere.calls
    assert metric is elsewhere.metric
    assert metric._forward_cache == 1.5
    assert options["metric_attribute"] == "metric"
    assert options["prog_bar"] is True
    assert member is elsewhere.scores["mean"]


def test_what_a_metric_returned_is_known_by_its_identity(
    module: Listener, log: MicrobatchLog
) -> None:
    module.extremes = Extremes()
    with log.microbatch(2):
        tensor = module.metric(torch.tensor([1.0, 2.0]))
        module.log("tensor", tensor)
        module.log("computed", tensor + 0)
        module.log_dict(module.extremes(torch.tensor([1.0, 2.0])))
    exact = {id(module.metric): 7.0, id(module.extremes): {"low": 8.0, "high": 9.0}}
    values = log.combine(lambda metric: exact.get(id(metric)))
    assert {logged.name: float(logged.value) for logged in values} == {
        "tensor": 7.0,
        "computed": 1.5,
        "low": 8.0,
        "high": 9.0,
    }


def test_values_are_detached_copies(module: Listener, log: MicrobatchLog) -> None:
    value = torch.ones((), requires_grad=True)
    record(module, log, 1, (value, {"enable_graph": True}))
    with torch.no_grad():
        value.mul_(7)
    (combined,) = log.combine()
    assert combined == LoggedValue(
        "name", torch.tensor(1.0), None, {"enable_graph": True, "reduce_fx": "mean"}
    )
    assert not combined.value.requires_grad


def test_clear_forgets(module: Listener, log: MicrobatchLog) -> None:
    record(module, log, 1, (1.0, {}))
    log.clear()
    assert log.combine() == []


def test_the_module_gets_its_own_log_back() -> None:
    module = Listener()
    log = MicrobatchLog(module, ReductionTracker())
    with log.attached():
        assert "log" in vars(module)
    assert "log" not in vars(module)


@pytest.mark.parametrize(
    ("value", "options", "error", "message"),
    [
        (1.0, {"reduce_fx": torch.std}, MisconfigurationException, "reduce_fx"),
        (1.0, {"sync_dist_group": "g"}, MisconfigurationException, "sync_dist_group"),
        (torch.ones(3), {}, ValueError, r"shape \(3,\)"),
        ("high", {}, ValueError, "`str` values"),
        (MeanMetric(), {}, MisconfigurationException, "MeanMetric"),
    ],
)
def test_refused(
    module: Listener,
    log: MicrobatchLog,
    value: Any,
    options: dict,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        record(module, log, 1, (value, options))


class TestAssumptionsAboutLightning:
    def test_log_dict_funnels_into_log(self) -> None:
        module = Listener()
        module.log_dict({"a": 1.0, "b": 2.0})
        assert [name for name, *_ in module.calls] == ["a", "b"]

    def test_an_instance_attribute_goes_in_front_of_log(self) -> None:
        module, seen = Listener(), []
        object.__setattr__(module, "log", lambda **call: seen.append(call["name"]))
        module.log_dict({"a": 1.0})
        assert seen == ["a"]

    def test_log_takes_these_arguments(self) -> None:
        names = {"name", "value", "reduce_fx", "batch_size", "sync_dist_group", "metric_attribute"}
        assert names <= set(inspect.signature(LightningModule.log).parameters)

    @pytest.mark.parametrize("reduce_fx", ["avg", "mean", torch.mean])
    def test_metadata_names_the_reduction(self, reduce_fx: Any) -> None:
        assert _Metadata("step", "name", reduce_fx=reduce_fx).reduce_fx.__name__ == "mean"

    def test_forward_keeps_the_object_it_returns(self) -> None:
        metric = MeanMetric()
        value: Tensor = metric(torch.ones(2))
        assert metric._forward_cache is value


# What micro-batches print is printed once, as on one process.


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("before", batch_idx, sep="-")
        loss = super().training_step(batch, batch_idx)
        self.print("behind", end="!\n")
        if self.accuracy.update_count == 2 and batch_idx == 0:
            self.print("second")
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
    kinds = "before", "behind", "second", "predicts", "epoch"
    return [line for line in out.getvalue().splitlines() if line.startswith(kinds)]


def pipeline(**options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, 4, pipeline="model", **options)


EXPECTED = ["before-0", "behind!", "second", "before-1", "behind!", "epoch", "predicts"]


def test_it_prints_what_one_process_prints() -> None:
    assert printed("auto") == [line for line in EXPECTED if line != "second"]
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


def test_standard_streams_alone_are_known_to_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def fit(file: Any) -> None:
        module = ToFile()
        module.file = file
        run = trainer(pipeline(transport="loopback"), max_epochs=1)
        run.fit(module, loader(1, batches=1))

    fit(sys.stderr)
    assert capsys.readouterr().err.count("behind\n") == 1
    with pytest.raises(MisconfigurationException, match=r"sends no files: use sys\.stdout"):
        fit(io.StringIO())
