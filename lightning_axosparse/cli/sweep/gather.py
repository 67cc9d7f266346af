"""Gathers all jobs of a sweep into a table, pictures and a page that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from omegaconf import OmegaConf

from lightning_axosparse.callbacks.report.page import page, picture, table
from lightning_axosparse.callbacks.report.tables import Section, as_markdown
from lightning_axosparse.cli.sweep.job import Job, command, jobs_in
from lightning_axosparse.cli.sweep.points import points
from lightning_axosparse.cli.sweep.tables import sections, write_csv


def gather(folder: Path) -> list[Job]:
    """Write ``sweep.csv``, ``sweep.md``, ``sweep.html`` and pictures; return the jobs.

    Args:
        folder: of the sweep, with a folder for each job.
    """
    # matplotlib takes long to import.
    from lightning_axosparse.cli.sweep.pictures import save_pictures

    jobs = jobs_in(folder)
    found = points(jobs)
    tables = sections(jobs, found)
    pictures = save_pictures(found, folder)
    write_csv(jobs, folder / "sweep.csv")
    (folder / "sweep.md").write_text(_markdown(folder, jobs, tables, pictures))
    (folder / "sweep.html").write_text(_page(folder, jobs, tables, pictures))
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


def _markdown(
    folder: Path, jobs: Sequence[Job], tables: Sequence[Section], pictures: Sequence[str]
) -> str:
    blocks = ["# Sweep", _finished(jobs)]
    if resume := resume_command(folder):
        blocks.append(f"The command that goes on with it:\n\n```bash\n{resume}\n```")
    blocks += [f"![{name}]({name})" for name in pictures]
    blocks += [as_markdown(table) for table in tables]
    return "\n\n".join(blocks) + "\n"


def _page(
    folder: Path, jobs: Sequence[Job], tables: Sequence[Section], pictures: Sequence[str]
) -> str:
    blocks = [f"<p>{_finished(jobs)}</p>"]
    if resume := resume_command(folder):
        blocks.append(f"<p>The command that goes on with it: <code>{escape(resume)}</code></p>")
    for name in pictures:
        blocks.append(f"<p>{picture(name, (folder / name).read_bytes())}</p>")
    return page("Sweep", [*blocks, *map(table, tables)])
