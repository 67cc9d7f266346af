from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchmetrics import (
    CatMetric,
    ClasswiseWrapper,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    R2Score,
)
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassRecall

from lightning_axosparse.strategy.compat.metrics import PipelinedMetrics
from tests.strategy.compat.harness import CutStrategy, Groups, alone, assert_same, fit
from tests.strategy.compat.module import LogsEverything, Peak


class Holder(LightningModule):
    def __init__(self, **metrics: Any) -> None:
        super().__init__()
        for name, metric in metrics.items():
            setattr(self, name, metric)


def attached(module: LightningModule, groups: Groups | None = None) -> PipelinedMetrics:
    groups = groups or alone()
    metrics = PipelinedMetrics(module, groups.inter, groups.data, groups.last_rank, groups.is_last)
    metrics.attach()
    return metrics


def scores_and_labels(samples: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(samples, 4, generator=generator), torch.arange(samples) % 4


# One rank


@pytest.mark.parametrize(
    "metric",
    [
        MulticlassAccuracy(4, average="macro"),
        MulticlassAccuracy(4, average="macro", dist_sync_on_step=True),
        MulticlassRecall(4, average="macro") / MulticlassAccuracy(4, average="micro"),
        ClasswiseWrapper(MulticlassAccuracy(4, average=None)),
        MetricCollection([MulticlassAccuracy(4), MulticlassRecall(4)]),
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_batch_value_is_that_of_the_whole_batch(metric: Any) -> None:
    scores, labels = scores_and_labels()
    expected = metric.clone()(scores, labels)
    module = Holder(metric=metric)
    metrics = attached(module)
    module.metric(scores.flip(0), labels)
    for _ in range(2):
        with metrics.batch(3):
            for part in zip(scores.split([9, 9, 6]), labels.split([9, 9, 6]), strict=True):
                module.metric(*part)
        if isinstance(metric, MetricCollection):
            value = {name: metrics.batch_value(part) for name, part in module.metric.items()}
        else:
            value = metrics.batch_value(module.metric)
        torch.testing.assert_close(value, expected)


def test_a_metric_that_needs_more_samples_than_a_micro_batch_has() -> None:
    predicted, wanted = torch.rand(2, 6, generator=torch.Generator().manual_seed(5))
    module = Holder(r2=R2Score(), both=MetricCollection([R2Score(), MeanSquaredError()]))
    metrics = attached(module)
    for _ in range(2):
        with metrics.batch(6):
            for part in zip(predicted.split(1), wanted.split(1), strict=True):
                assert module.r2(*part).isnan()
                assert module.both(*part)["R2Score"].isnan()
        for metric in (module.r2, module.both["R2Score"]):
            torch.testing.assert_close(metrics.batch_value(metric), R2Score()(predicted, wanted))
    twice = [torch.cat([part, part]) for part in (predicted, wanted)]
    torch.testing.assert_close(module.r2.compute(), R2Score()(*twice))
    module.r2.reset()
    with pytest.raises(ValueError, match="two samples"), metrics.batch(1):
        module.r2(predicted[:1], wanted[:1])
    with pytest.raises(ValueError, match="two samples"):
        module.r2.compute()


def test_batch_value_of_weighted_means_and_of_states_that_cannot_be_merged() -> None:
    values, weights = torch.rand(12), torch.rand(12)
    module = Holder(mean=MeanMetric(), peak=Peak())
    metrics = attached(module)
    with metrics.batch(3):
        for value, weight in zip(values.split(4), weights.split(4), strict=True):
            module.mean(value, weight)
            module.peak(value)
    expected = (values * weights).sum() / weights.sum()
    torch.testing.assert_close(metrics.batch_value(module.mean), expected)
    torch.testing.assert_close(metrics.batch_value(module.peak), Peak()(values))


def test_no_batch_value_where_it_would_be_ambiguous() -> None:
    module = Holder(twice=MeanMetric(), updated=MeanMetric(), single=MeanMetric())
    metrics = attached(module)
    with metrics.batch(2):
        for _ in range(2):
            module.twice(1.0)
            module.twice(2.0)
            module.updated.update(1.0)
    assert metrics.batch_value(module.twice) is None
    assert metrics.batch_value(module.updated) is None
    with metrics.batch(1):
        module.single(3.0)
    assert metrics.batch_value(module.single) is None


def test_accumulated_states_are_those_without_micro_batches() -> None:
    scores, labels = scores_and_labels()
    module = Holder(accuracy=MulticlassAccuracy(4), all=CatMetric())
    metrics = attached(module)
    with metrics.batch(2):
        for part in zip(scores.chunk(2), labels.chunk(2), strict=True):
            module.accuracy(*part)
            module.all(part[1])
        running = module.accuracy.compute()
    plain = MulticlassAccuracy(4)
    plain.update(scores, labels)
    assert running == module.accuracy.compute() == plain.compute()
    assert torch.equal(module.all.compute(), labels.float())


def test_detach_restores_the_metric() -> None:
    module = Holder(mean=MeanMetric(), scores=MetricCollection({"m": MeanMetric()}))
    before = [dict(vars(metric)) for metric in (module.mean, module.scores["m"])]
    metrics = attached(module)
    module.mean(2.0)
    assert vars(module.mean).keys() > before[0].keys()
    metrics.detach()
    for metric, was in zip((module.mean, module.scores["m"]), before, strict=True):
        assert vars(metric).keys() == was.keys()
        assert metric.distributed_available_fn is was["distributed_available_fn"]
        assert metric.dist_sync_fn is was["dist_sync_fn"]
    assert module.mean.compute() == 2.0
    assert module.mean.clone().compute() == 2.0


def test_copies_of_an_attached_metric_work() -> None:
    module = Holder(tracker=MetricTracker(MeanMetric(), maximize=True))
    metrics = attached(module)
    for value in (1.0, 3.0):
        module.tracker.increment()
        with metrics.batch(2):
            module.tracker(value)
            module.tracker(value)
    assert module.tracker.best_metric() == 3.0
    assert copy.deepcopy(module).tracker.compute() == 3.0
    metrics.detach()
    assert all("forward" not in vars(metric) for metric in module.tracker)


# Real ranks


def fit_on_stages(groups: Groups, microbatches: int, lr: float) -> tuple[list, list, list]:
    module = LogsEverything(lr)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(module, CutStrategy(microbatches, groups))
    early = [str(w.message) for w in caught if "before the ``update``" in str(w.message)]
    return history.moments, module.by_hand, early


def fit_ddp() -> tuple[list, list]:
    module = LogsEverything(0.0)
    history = fit(module, DDPStrategy(process_group_backend="gloo"), devices=2)
    return history.moments, module.by_hand


def test_two_stages_see_what_one_process_sees(on_two: list[Any]) -> None:
    module = LogsEverything()
    theirs = fit(module, "auto")
    for moments, by_hand, early in (found["stages"] for found in on_two):
        assert_same(moments, theirs.moments)
        assert by_hand == pytest.approx(module.by_hand)
        assert early == []


def test_two_stages_by_two_replicas_see_what_ddp_sees(on_two: list, on_four: list) -> None:
    for rank, (moments, by_hand, early) in enumerate(found["grid"] for found in on_four):
        their_moments, their_by_hand = on_two[rank // 2]["ddp"]
        assert_same(moments, their_moments)
        assert by_hand == pytest.approx(their_by_hand)
        assert early == []


def unusual_metrics(groups: Groups) -> dict[str, Any]:
    """Each value as this rank computes it after the last stages saw their replica's samples."""
    module = Holder(
        scores=MetricCollection([MulticlassAccuracy(4), MulticlassRecall(4, average="macro")]),
        auroc=BinaryAUROC(),
        ratio=MulticlassAccuracy(4) / MeanMetric(),
        empty_on_replica_0=CatMetric(),
        stepwise=MulticlassAccuracy(4, dist_sync_on_step=True),
    )
    for part in module.modules():
        if isinstance(part, Metric):
            part.persistent(True)
    metrics = attached(module, groups)
    scores, labels = scores_and_labels()
    scores, labels = (t.chunk(groups.grid.g_data)[groups.grid.replica] for t in (scores, labels))
    with metrics.batch(2):
        if groups.is_last:
            for part in zip(scores.chunk(2), labels.chunk(2), strict=True):
                module.scores.update(*part)
                module.auroc.update(part[0][:, 0], part[1] % 2)
                module.ratio.metric_a.update(*part)
                module.ratio.metric_b.update(part[0])
                module.stepwise(*part)
            if groups.grid.replica == 1:
                module.empty_on_replica_0.update([1.0, 2.0])
    values = {
        "scores": module.scores.compute(),
        "auroc": module.auroc.compute(),
        "ratio": module.ratio.compute(),
        "empty_on_replica_0": module.empty_on_replica_0.compute(),
        "accuracy again": module.scores["MulticlassAccuracy"].compute(),
        "stepwise": metrics.batch_value(module.stepwise),
    }
    with metrics.states_shared(groups.from_last_stage):
        values["state"] = module.auroc.state_dict()
        values["updates"] = module.auroc.update_count
    return values


def test_unusual_metrics_on_two_stages_by_two_replicas(on_four: list[Any]) -> None:
    scores, labels = scores_and_labels()
    accuracy, recall = MulticlassAccuracy(4), MulticlassRecall(4, average="macro")
    whole = accuracy(scores, labels)
    for rank, values in enumerate(found["metrics"] for found in on_four):
        torch.testing.assert_close(
            values["scores"],
            {"MulticlassAccuracy": whole, "MulticlassRecall": recall(scores, labels)},
        )
        torch.testing.assert_close(values["auroc"], BinaryAUROC()(scores[:, 0], labels % 2))
        torch.testing.assert_close(values["ratio"], whole / scores.mean())
        torch.testing.assert_close(values["accuracy again"], whole)
        torch.testing.assert_close(values["empty_on_replica_0"], torch.tensor([1.0, 2.0]))
        if rank % 2:
            torch.testing.assert_close(values["stepwise"], whole)
        own = scores.chunk(2)[rank // 2][:, 0]
        torch.testing.assert_close(torch.cat(values["state"]["preds"]), own)
        assert values["updates"] == 2


class TestAssumptionsAboutTorchmetrics:
    def test_copies_wrap_compute_by_the_instance(self) -> None:
        metric = MeanMetric()
        metric._wrap_compute = wrap_seven
        assert copy.deepcopy(metric).compute() == 7

    def test_call_goes_to_the_instance(self) -> None:
        metric = MeanMetric()
        metric.forward = lambda value: "mine"
        assert metric(1.0) == "mine"

    def test_the_instance_says_whether_and_how_to_synchronise(self) -> None:
        metric = MeanMetric()
        metric.distributed_available_fn = lambda: True
        metric.dist_sync_fn = lambda tensor, group: [tensor, tensor + 2]
        metric.update(2.0)
        assert metric.compute() == (2 + 4) / (1 + 3)
        metric._to_sync = False
        metric._computed = None
        assert metric.compute() == 2.0


def wrap_seven(compute: Any) -> Any:
    return lambda: 7
