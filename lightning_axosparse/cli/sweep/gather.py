"""Gathers all jobs of a sweep into a page that stands alone: the command ``axosparse-sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_axosparse.cli.sweep.job import Job, command, jobs_in
from lightning_axosparse.cli.sweep.points import curves, points, sections, write_csv


def gather(folder: Path) -> list[Job]:
    """Write ``sweep.csv``, ``sweep.html`` and pictures to a sweep's folder; return its jobs."""
    # matplotlib takes long to import.
    from lightning_axosparse.callbacks.report.page import figure, page, save_plots, table

    jobs = jobs_in(folder)
    found = points(jobs)
    write_csv(jobs, folder / "sweep.csv")
    blocks = [f"<p>{_finished(jobs)}</p>"]
    if resume := resume_command(folder):
        blocks.append(f"<p>The command that goes on with it: <code>{escape(resume)}</code></p>")
    plots = curves(found)
    save_plots(plots, folder)
    blocks += [figure(name, plot) for name, plot in plots.items()]
    blocks += map(table, sections(jobs, found))
    (folder / "sweep.html").write_text(page("Sweep", blocks))
    return jobs


def summary(folder: Path, jobs: Sequence[Job]) -> str:
    """Return in words how many jobs have finished, what others need, and where the report is."""
    lines = [_finished(jobs)]
    for job in jobs:
        if job.result is None:
            problem = job.problem or "it was killed, or still runs"
            lines.append(f"{job.folder.name} has {job.status}: {problem}")
            lines.append(f"    {job.command}")
    return "\n".join([*lines, f"Report of the sweep: {folder.absolute() / 'sweep.html'}"])


def resume_command(folder: Path) -> str | None:
    """Return the command that goes on with the sweep; None if Hydra did not start it."""
    file = folder / "multirun.yaml"
    if not file.exists():
        return None
    overrides = OmegaConf.load(file).hydra.overrides
    return command(["-m"], overrides.task, overrides.hydra, "hydra.sweep.dir", folder)


def _finished(jobs: Sequence[Job]) -> str:
    return f"{sum(job.result is not None for job in jobs)} of {len(jobs)} jobs have finished."


class GatherResults(Callback):
    """Writes the report of a sweep at its end; the command fails if a job did not finish."""

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = gather(folder)
        print(summary(folder, jobs))
        if any(job.result is None for job in jobs):
            raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="axosparse-sweep",
        description="Gather the results of a sweep in its folder: sweep.csv, pictures, and "
        "sweep.html, which stands alone. Jobs that failed are listed with their commands.",
    )
    says = f"%(prog)s {version('lightning-axosparse')}"
    parser.add_argument("--version", action="version", version=says)
    parser.add_argument("folder", type=Path, help="hydra.sweep.dir of axosparse-train -m")
    folder: Path = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"'{folder}' is not a folder")
    jobs = gather(folder)
    if not jobs:
        parser.exit(1, f"No job has begun in '{folder}'.\n")
    print(summary(folder, jobs))


if __name__ == "__main__":
    main()
