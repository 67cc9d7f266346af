"""The file of results: one JSON line for each job that was finished, with all its settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.perplexity.arms import Pruned
from benchmarks.perplexity.job import Job

Line = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The lines of a file, read anew each time: another process may add some."""

    path: Path

    def lines(self) -> list[Line]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def of(self, job: Job) -> Line | None:
        """Return the line of a job, or None if it was not finished."""
        wanted = job.settings
        return next((x for x in self.lines() if {key: x[key] for key in wanted} == wanted), None)

    def add(self, job: Job, measured: Mapping[str, Any]) -> None:
        line = json.dumps({**job.settings, **measured}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def complete(self, jobs: Iterable[Job], english: Path | None = None) -> None:
        """Run the jobs that were not finished, and add the line of each as soon as it is.

        Args:
            jobs: the jobs.
            english: the folder of the English text, for tasks that need it.
        """
        for job in jobs:
            if self.of(job) is None:
                self.add(job, job.run(english, self.densities(job)))

    def densities(self, job: Job) -> dict[str, float]:
        """Return the layer densities that a job with random masks takes from the ticket.

        Raises:
            ValueError: if the ticket's job was not finished.
        """
        if not isinstance(job.arm, Pruned) or job.arm.masks != "random":
            return {}
        line = self.of(replace(job, arm=replace(job.arm, masks="ticket")))
        if line is None:
            raise ValueError(f"Random masks need the ticket's densities; run its job first: {job}.")
        densities: dict[str, float] = line["densities"]
        return densities
