"""Reads from its folder what a job of a sweep is, how it ended, and how to run it again."""

from __future__ import annotations

import json
import re
import shlex
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from lightning_axosparse.callbacks.report.facts import RunResult
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.support.files import CorruptFileError, replacing
from lightning_axosparse.support.troubleshooting import see

RESULT = "result.jsonl"
_ERROR = "error.txt"
_CONSUMED = ("seed", "data", "model", "trainer", "callbacks")
"""The parts of the configuration that make a run what it is, beside what prunes."""

Status = Literal["finished", "failed", "not finished"]


@dataclass(frozen=True)
class Job:
    """One run of ``axosparse-train``, in a sweep or alone: its folder, and what is read there.

    ``config`` is not resolved; ``error`` is the message of a job that has failed, or whose result
    is damaged.
    """

    folder: Path
    config: DictConfig
    overrides: Sequence[str]
    hydra_overrides: Sequence[str]
    result: RunResult | None
    error: str | None

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read a job's folder; FileNotFoundError if no run has begun there."""
        hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.overrides
        config = OmegaConf.load(folder / ".hydra" / "config.yaml")
        assert isinstance(config, DictConfig)
        result = None
        error = (folder / _ERROR).read_text() if (folder / _ERROR).exists() else None
        try:
            result = RunResult.load(folder / RESULT) if (folder / RESULT).exists() else None
        except CorruptFileError as damage:
            error = str(damage)
        return cls(folder, config, list(hydra.task), list(hydra.hydra), result, error)

    @property
    def status(self) -> Status:
        """How it ended; "not finished": it was killed, or is still running."""
        if self.result is not None:
            return "finished"
        return "not finished" if self.error is None else "failed"

    @property
    def problem(self) -> str:
        """The first line of the error; empty if it did not fail."""
        return (self.error or "").partition("\n")[0]

    @property
    def arm(self) -> str:
        """The name of what is compared; without arms "ticket" or "dense"."""
        named = OmegaConf.select(self.config, "arm.name")
        return str(named or ("ticket" if self.config.pruning.callback else "dense"))

    @property
    def ratio(self) -> float | None:
        """The pruning ratio that it stands for; None if it is the same for all ratios."""
        if OmegaConf.select(self.config, "arm.name"):
            ratio = OmegaConf.select(self.config, "arm.ratio")
        else:
            ratio = self.config.pruning.ratio if self.config.pruning.callback else None
        return None if ratio is None else float(ratio)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.seed)

    @property
    def command(self) -> str:
        """The command that runs it alone, in its folder."""
        return command([], self.overrides, self.hydra_overrides, "hydra.run.dir", self.folder)


def jobs_in(folder: Path) -> list[Job]:
    """Return the jobs that have begun in a sweep's folder, in the natural order of their names."""
    folders = [path.parent.parent for path in folder.rglob(".hydra/hydra.yaml")]
    return [Job.read(path) for path in sorted(folders, key=lambda path: _natural(str(path)))]


def command(
    options: Sequence[str],
    overrides: Sequence[str],
    hydra_overrides: Sequence[str],
    key: str,
    folder: Path,
) -> str:
    """Return the ``axosparse-train`` command that writes to ``folder``, for a shell."""
    of_sweep = "hydra.mode=", "hydra.sweep.", "hydra.run.dir="
    others = [override for override in hydra_overrides if not override.startswith(of_sweep)]
    path = str(folder.absolute())
    if not re.fullmatch(r"[\w./:+-]+", path):
        path = '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shlex.join(["axosparse-train", *options, *overrides, *others, f"{key}={path}"])


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return what makes a run what it is, as plain values; paths are relative to its folder."""
    moved = config.copy()
    moved.folder = "."
    parts = {**{name: moved[name] for name in _CONSUMED}, "pruning": moved.pruning.callback}
    settings = {
        name: OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
        for name, part in parts.items()
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def finished_before(config: DictConfig) -> RunResult | None:
    """Return the result that an earlier call left of this job, if any, and of no other one."""
    path = Path(config.folder) / RESULT
    if not path.exists():
        return None
    result = RunResult.load(path)
    different = difference(result.settings, settings_of(config))
    if different is not None:
        raise ValueError(
            f"'{path}' is the result of another job: {different}. Choose another hydra.sweep.dir, "
            "or delete this folder." + see("commands")
        )
    return result


def difference(before: Any, now: Any, name: str = "") -> str | None:
    """Return the first setting that differs, in words; None if all are equal."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = difference(before.get(key), now.get(key), f"{name}.{key}" if name else key)
            if inner is not None:
                return inner
        return None
    return None if before == now else f"there {name}={before!r}, here {now!r}"


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Leave the message of an error in the job's folder, and nothing of earlier attempts."""
    for name in (RESULT, _ERROR):
        (folder / name).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with replacing(folder / _ERROR) as file:
            file.write(f"{message(error)}\n\n{traceback.format_exc()}".encode())
        raise


def message(error: Exception) -> str:
    """Return the error's message; for an object, after its group of the configuration."""
    if isinstance(error, MissingMandatoryValue):
        name = str(error.full_key)
        return f"{name} is missing: give {name}=VALUE." + see("commands")
    if not isinstance(error, InstantiationException):
        return str(error) or type(error).__name__
    group = str(error).rpartition("full_key: ")[2]
    cause = error.__cause__
    return f"{group}: {cause if cause is not None else str(error).partition(chr(10))[0]}"


def _natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts numbers inside of texts by their values."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


# What other jobs have made


def random_ticket(folder: str, seed: int) -> Ticket:
    """Return a random ticket with the layer densities of the one that a job drew in ``folder``.

    Otherwise the error says what to run.
    """
    path = Path(folder).resolve()
    try:
        job = Job.read(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"This arm needs the ticket of '{path}', but no job has run there. Run "
            "arm=ticket with the same ratio and seed before it." + see("commands")
        ) from error
    if job.result is None:
        reason = f": {job.problem}" if job.problem else ""
        raise ValueError(
            f"This arm needs the ticket of '{path}', but that job has {job.status}"
            f"{reason}. Run it again with: {job.command}" + see("commands")
        )
    if job.result.draw_step is None:
        raise ValueError(
            f"This arm needs the ticket of '{path}', but that job drew none. Train "
            "it to the end of pruning: lower pruning.end." + see("commands")
        )
    return Ticket.load(path / "ticket.pt").random(seed)
