"""The callback of Hydra that gathers the results when all jobs of a sweep have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_axosparse.cli.sweep.gather import gather, summary


class GatherResults(Callback):
    """Writes the report of a sweep at its end; the command fails if a job did not finish."""

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = gather(folder)
        print(summary(folder, jobs))
        if any(job.result is None for job in jobs):
            raise SystemExit(1)
