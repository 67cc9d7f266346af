"""Makes what the arms of a sweep need: tickets of other jobs, or of initial weights."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.utilities.seed import isolate_rng
from omegaconf import DictConfig

from lightning_axosparse.cli.sweep.job import Job
from lightning_axosparse.pruning.prunable import Prune
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.support.troubleshooting import see


def random_ticket(folder: str, seed: int) -> Ticket:
    """Return a random ticket with the layer densities of the one that a job drew.

    Args:
        folder: of that job.
        seed: makes it repeatable.

    Raises:
        ValueError: if there is no ticket.
    """
    job = finished_job(Path(folder).resolve())
    return Ticket.load(job.folder / "ticket.pt").random(seed)


def initial_magnitudes(
    model: DictConfig, seed: int, pruning_ratio: float, floor: float, prune: Prune | None
) -> Ticket:
    """Return the ticket of the largest initial weights of a model.

    Args:
        model: its configuration.
        seed: of the run, whose initial weights these are.
        pruning_ratio: as for :meth:`Ticket.magnitude`.
        floor: likewise.
        prune: likewise.
    """
    with isolate_rng():
        L.seed_everything(seed, verbose=False)
        return Ticket.magnitude(instantiate(model), pruning_ratio, "global", floor, prune)


def finished_job(folder: Path) -> Job:
    """Return the job that drew a ticket in ``folder``.

    Raises:
        ValueError: if it has not run, failed, or drew no ticket; says what to run.
    """
    try:
        job = Job.read(folder)
    except FileNotFoundError as error:
        raise ValueError(
            f"This arm needs the ticket of '{folder}', but no job has run there. Run "
            "arm=ticket with the same ratio and seed before it." + see("commands")
        ) from error
    if job.result is None:
        reason = f": {job.problem}" if job.problem else ""
        raise ValueError(
            f"This arm needs the ticket of '{folder}', but that job has {job.status}"
            f"{reason}. Run it again with: {job.command}" + see("commands")
        )
    if job.result.draw_step is None:
        raise ValueError(
            f"This arm needs the ticket of '{folder}', but that job drew none. Give it "
            "pruning.draw_by." + see("commands")
        )
    return job
