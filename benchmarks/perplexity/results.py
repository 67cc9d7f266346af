"""The file of results: one JSON line for each job that was finished, with all its settings."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.perplexity.job import Job, digest

Line = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The lines of a file, read anew each time: another process may add some."""

    path: Path

    def lines(self) -> dict[Job, Line]:
        """Return the line of each job that was finished."""
        if not self.path.exists():
            return {}
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {Job.of(line): line for line in lines}

    def add(self, job: Job, measured: Mapping[str, Any]) -> None:
        line = json.dumps({**job.settings, **measured}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def complete(self, jobs: Iterable[Job], states: Path, folder: Path | None = None) -> None:
        """Run the jobs that were not finished, and add the line of each as soon as it is.

        Several processes may do so at once: a job that another one runs is left to it.

        Args:
            jobs: the jobs.
            states: where states of training are kept.
            folder: of text, for tasks that need one.
        """
        states.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            with (states / f"{digest(job.settings)}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                if job not in self.lines():
                    self.add(job, job.run(folder, states))
