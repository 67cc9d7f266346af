from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import (
    CatMetric,
    ClasswiseWrapper,
    MeanMetric,
    MetricCollection,
    MetricTracker,
)
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassRecall

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import ProcessGroups
from lightning_axosparse.strategy.compat.metrics import PipelinedMetrics
from lightning_axosparse.support.torch_internals import tree_leaves
from tests.parity.cases import free_port, join_ddp
from tests.ranks import run_ranks
from tests.strategy.compat.harness import Moments, assert_same, fit
from tests.strategy.compat.module import LogsEverything


class Holder(LightningModule):
    def __init__(self, **metrics: Any) -> None:
        super().__init__()
        for name, metric in metrics.items():
            setattr(self, name, metric)


def attached(module: LightningModule, groups: ProcessGroups | None = None) -> PipelinedMetrics:
    groups = groups or ProcessGroups(Grid(1, 1))
    last = groups.grid.g_inter - 1
    metrics = PipelinedMetrics(
        module,
        (),
        groups.data,
        lambda value: groups.broadcast_along_pipeline(value, last),
        groups.grid.stage == last,
        lambda action: None,
    )
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
def test_micro_batches_change_no_metric_and_get_no_number(metric: Any) -> None:
    scores, labels = scores_and_labels()
    plain, module = metric.clone(), Holder(metric=metric)
    metrics = attached(module)
    for _ in range(2):
        with metrics.skipped():
            for part in zip(scores.split(1), labels.split(1), strict=True):
                values = tree_leaves(module.metric(*part))
                assert values
                assert all(value.isnan().all() for value in values)
                module.metric.update(*part)
        assert metrics.touched
        with metrics.counted():
            torch.testing.assert_close(module.metric(scores, labels), plain(scores, labels))
        torch.testing.assert_close(module.metric.compute(), plain.compute())


def test_a_micro_batch_computes_what_was_counted_before() -> None:
    module = Holder(mean=MeanMetric())
    metrics = attached(module)
    module.mean.update(2.0)
    with metrics.skipped():
        module.mean.update(5.0)
        assert module.mean.compute() == 2.0
    module.mean.update(4.0)
    assert module.mean.compute() == 3.0


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
        with metrics.skipped():
            module.tracker(7.0)
        module.tracker(value)
    assert module.tracker.best_metric() == 3.0
    assert copy.deepcopy(module).tracker.compute() == 3.0
    metrics.detach()
    assert all("forward" not in vars(metric) for metric in module.tracker)


# Real ranks


def fit_on_stages(ranks: int, lr: float) -> tuple[Moments, list[float], list[str]]:
    module = LogsEverything(lr)
    strategy = AxoSparseStrategy(2, 3, pipeline="net")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moments = fit(module, strategy, devices=ranks, precision="64-true")
    early = [str(w.message) for w in caught if "before the ``update``" in str(w.message)]
    return moments, module.by_hand, early


def fit_ddp(port: int) -> tuple[Moments, list[float]]:
    join_ddp(2, port)
    module = LogsEverything(0.0)
    return fit(module, "ddp", devices=2, precision="64-true"), module.by_hand


def compare(found: list[Any], expected: list[Any]) -> None:
    """Compare what ranks saw; loggers write on the first rank alone."""
    for rank, (moments, by_hand, early) in enumerate(found):
        theirs, their_by_hand = expected[rank * len(expected) // len(found)]
        if rank:
            theirs = [(at, seen) for at, seen in theirs if at != "logger"]
        assert_same(moments, theirs)
        assert by_hand == pytest.approx(their_by_hand)
        assert early == []


def test_two_stages_see_what_one_process_sees() -> None:
    module = LogsEverything()
    moments = fit(module, "auto", precision="64-true")
    compare(run_ranks(2, fit_on_stages, 2, 0.1), [(moments, module.by_hand)])


def test_two_stages_by_two_replicas_see_what_ddp_sees() -> None:
    compare(run_ranks(4, fit_on_stages, 4, 0.0), run_ranks(2, fit_ddp, free_port()))


def unusual_metrics() -> dict[str, Any]:
    """Each value as this rank computes it after the last stages saw their replica's samples."""
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    groups = ProcessGroups(Grid(4, 2, dist.get_rank()))
    module = Holder(
        scores=MetricCollection([MulticlassAccuracy(4), MulticlassRecall(4, average="macro")]),
        auroc=BinaryAUROC(),
        ratio=MulticlassAccuracy(4) / MeanMetric(),
        empty_on_replica_0=CatMetric(),
        stepwise=MulticlassAccuracy(4, dist_sync_on_step=True),
    )
    metrics = attached(module, groups)
    scores, labels = scores_and_labels()
    scores, labels = (t.chunk(groups.grid.g_data)[groups.grid.replica] for t in (scores, labels))
    stepwise = None
    with metrics.counted():
        if groups.grid.stage == 1:
            for part in zip(scores.chunk(2), labels.chunk(2), strict=True):
                module.scores.update(*part)
                module.auroc.update(part[0][:, 0], part[1] % 2)
                module.ratio.metric_a.update(*part)
                module.ratio.metric_b.update(part[0])
            stepwise = module.stepwise(scores, labels)
            if groups.grid.replica == 1:
                module.empty_on_replica_0.update([1.0, 2.0])
    return {
        "scores": module.scores.compute(),
        "auroc": module.auroc.compute(),
        "ratio": module.ratio.compute(),
        "empty_on_replica_0": module.empty_on_replica_0.compute(),
        "accuracy again": module.scores["MulticlassAccuracy"].compute(),
        "stepwise": stepwise,
    }


def test_unusual_metrics_on_two_stages_by_two_replicas() -> None:
    scores, labels = scores_and_labels()
    accuracy, recall = MulticlassAccuracy(4), MulticlassRecall(4, average="macro")
    whole = accuracy(scores, labels)
    for rank, values in enumerate(run_ranks(4, unusual_metrics)):
        torch.testing.assert_close(
            values["scores"],
            {"MulticlassAccuracy": whole, "MulticlassRecall": recall(scores, labels)},
        )
        torch.testing.assert_close(values["auroc"], BinaryAUROC()(scores[:, 0], labels % 2))
        torch.testing.assert_close(values["ratio"], whole / scores.mean())
        torch.testing.assert_close(values["accuracy again"], whole)
        torch.testing.assert_close(values["empty_on_replica_0"], torch.tensor([1.0, 2.0]))
        torch.testing.assert_close(values["stepwise"], None if rank % 2 else whole)
