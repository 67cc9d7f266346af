"""Makes Lightning's ThroughputMonitor count batches once, and not once per stage."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_axosparse.strategy.compat.hooks import callbacks_of


def count_replicas(trainer: pl.Trainer, replicas: int) -> None:
    """Let the monitors of a Trainer know how many ranks are given different batches.

    Their samples per second are then those of the job, and "device" is a replica: what it computes
    of the FLOPs that its stages could.

    Args:
        trainer: the Trainer, whose ``setup`` hooks were called.
        replicas: the data-parallel size.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, ThroughputMonitor):
            of_device = callback.available_flops
            of_replica = of_device and of_device * (trainer.world_size // replicas)
            for throughput in callback._throughputs.values():
                throughput.world_size = replicas
                throughput.available_flops = of_replica
