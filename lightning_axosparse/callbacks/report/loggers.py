"""Sends what the report measures to the Trainer's loggers: numbers, and pictures where they fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_axosparse.callbacks.report.facts import Work
from lightning_axosparse.callbacks.ticket_search import search_of
from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket


def log_storage(trainer: Trainer, state_bytes: int) -> None:
    """Log the bytes of the model state over all ranks, and the density of each pruned layer.

    Collective. It is for the first step with dense weights, and the first with sparse ones.

    Args:
        trainer: the trainer.
        state_bytes: of the model state of this rank.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    metrics: dict[str, float] = {"state_bytes": sum(all_gather(state_bytes, group))}
    search = search_of(trainer)
    if search is not None and search.ticket is not None and trainer.is_global_zero:
        metrics |= {f"density/{name}": kept for name, kept in _densities(search.ticket).items()}
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


def log_work(trainer: Trainer, work: Work) -> None:
    """Log where the time of the last batches went, and how many micro-batches stages held.

    Collective.

    Args:
        trainer: the trainer.
        work: of this rank in these batches.
    """
    ranks = all_gather(work, dist.group.WORLD if dist.is_initialized() else None)
    held = [most for rank in ranks for most in rank.peak_in_flight.values()]
    metrics = {
        "seconds_per_batch/all": fmean(rank.seconds / rank.steps for rank in ranks),
        "in_flight": float(max(held, default=0)),
        "reduced_bytes": float(sum(rank.reduced_bytes for rank in ranks)),
    }
    for part in ranks[0].seconds_per_step():
        name = f"seconds_per_batch/{part.replace(', ', '_and_')}"
        metrics[name] = fmean(rank.seconds_per_step()[part] for rank in ranks)
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


def _densities(ticket: Ticket | ChannelTicket) -> dict[str, float]:
    """Return the fraction kept of each weight, or of the channels of each layer."""
    if isinstance(ticket, ChannelTicket):
        return {name: kept / every for name, (every, kept) in ticket.layer_channels().items()}
    return {name: 1 - pruned for name, pruned in ticket.layer_sparsity().items()}


def log_pictures(loggers: Iterable[Any], folder: Path, names: Sequence[str], step: int) -> None:
    """Give the pictures of the report to the loggers that take images.

    They are loggers with ``log_image``, such as Weights & Biases, and those with an
    ``experiment.add_image``, such as TensorBoard.

    Args:
        loggers: the trainer's.
        folder: where the pictures are.
        names: of their files.
        step: the optimizer step that they are logged at.
    """
    from matplotlib.image import imread

    for logger in loggers:
        for name in names:
            path, key = folder / name, Path(name).stem
            if hasattr(logger, "log_image"):
                logger.log_image(key, [str(path)], step=step)
            elif hasattr(logger.experiment, "add_image"):
                logger.experiment.add_image(key, imread(path), step, dataformats="HWC")
