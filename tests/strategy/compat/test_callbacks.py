"""ThroughputMonitor: what it is told of replicas and stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_axosparse.strategy.compat.callbacks import count_replicas


def rates(replicas: int, available_flops: float | None = 1000) -> dict[str, Any]:
    """What is logged on a rank of four that has trained on 5 samples in 2 seconds."""
    monitor: Any = ThroughputMonitor(len)
    monitor.available_flops = available_flops
    monitor._throughputs = {"train": Throughput(available_flops, world_size=4, window_size=2)}
    trainer: Any = SimpleNamespace(callbacks=[monitor], world_size=4)
    for _ in range(2):  # Another setup changes nothing.
        count_replicas(trainer, replicas)
    throughput = monitor._throughputs["train"]
    throughput.update(time=1, batches=1, samples=5, flops=600)
    throughput.update(time=3, batches=2, samples=10, flops=600)
    return throughput.compute()


def test_stages_of_a_replica_count_once() -> None:
    logged = rates(replicas=2)
    assert logged["device/samples_per_sec"] == 2.5
    assert logged["samples_per_sec"] == 5
    assert logged["flops_per_sec"] == 600


def test_flops_are_compared_with_those_of_all_stages() -> None:
    assert [rates(replicas)["device/mfu"] for replicas in (1, 2, 4)] == [0.075, 0.15, 0.3]
    assert "device/mfu" not in rates(2, available_flops=None)
