"""Reads a run's folder: its configuration, its result or error, and the command to repeat it."""

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
_SETTINGS = ("seed", "data", "model", "trainer", "callbacks")
"""The parts of the configuration that determine a run's result, besides pruning."""

Status = Literal["finished", "failed", "not finished"]


@dataclass(frozen=True)
class Job:
    """One run of ``axosparse-train``, in a sweep or alone, as read from its folder.

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
        """Read a job's folder.

        Raises:
            FileNotFoundError: if no run has begun there.
        """
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
        """How the job ended; "not finished" if it was killed, or is still running."""
        if self.result is not None:
            return "finished"
        return "not finished" if self.error is None else "failed"

    @property
    def problem(self) -> str:
        """The first line of the error; empty if there is none."""
        return (self.error or "").partition("\n")[0]

    @property
    def arm(self) -> str:
        """The name of the job's arm in a comparison; "ticket" or "dense" if it names none."""
        name = OmegaConf.select(self.config, "arm.name")
        return str(name or ("ticket" if self.config.pruning.callback else "dense"))

    @property
    def ratio(self) -> float | None:
        """The pruning ratio; None if the arm is the same at all ratios, as "dense" is."""
        if OmegaConf.select(self.config, "arm.name"):
            return self._number("arm.ratio")
        return self._number("pruning.ratio") if self.config.pruning.callback else None

    @property
    def seed(self) -> float | None:
        """The seed of the run."""
        return self._number("seed")

    def _number(self, name: str) -> float | None:
        """Return a setting; None if it is no number, as in a job that failed because of that."""
        value = OmegaConf.select(self.config, name, throw_on_resolution_failure=False)
        return value if isinstance(value, int | float) else None

    @property
    def command(self) -> str:
        """The command that runs this job alone, in its folder."""
        return command([], self.overrides, self.hydra_overrides, "hydra.run.dir", self.folder)


def jobs_in(folder: Path) -> list[Job]:
    """Return the jobs that have begun in a sweep's folder, in the natural order of their names."""
    folders = [path.parent.parent for path in folder.rglob(".hydra/hydra.yaml")]
    found = [Job.read(path) for path in sorted(folders, key=lambda path: _natural_key(str(path)))]
    return [job for job in found if "pruning" in job.config]  # Evaluations prune nothing.


def command(
    options: Sequence[str],
    overrides: Sequence[str],
    hydra_overrides: Sequence[str],
    key: str,
    folder: Path,
) -> str:
    """Return the ``axosparse-train`` command that writes to ``folder``, for a shell."""
    replaced = "hydra.mode=", "hydra.sweep.", "hydra.run.dir="
    others = [override for override in hydra_overrides if not override.startswith(replaced)]
    path = str(folder.absolute())
    if not re.fullmatch(r"[\w./:+-]+", path):
        path = '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shlex.join(["axosparse-train", *options, *overrides, *others, f"{key}={path}"])


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return the settings that determine a run's result, with paths relative to its folder."""
    moved = config.copy()
    moved.folder = "."
    parts = {**{name: moved[name] for name in _SETTINGS}, "pruning": moved.pruning.callback}
    settings = {
        name: OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
        for name, part in parts.items()
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def earlier_result(config: DictConfig) -> RunResult | None:
    """Return the result of an earlier run of this job; None if there is none.

    Raises:
        ValueError: if the folder has the result of another job.
    """
    path = Path(config.folder) / RESULT
    if not path.exists():
        return None
    result = RunResult.load(path)
    different = first_difference(result.settings, settings_of(config))
    if different is not None:
        raise ValueError(
            f"'{path}' is the result of another job: {different}. Choose another hydra.sweep.dir, "
            "or delete this folder." + see("commands")
        )
    return result


def first_difference(before: Any, now: Any, name: str = "") -> str | None:
    """Return the first setting that differs, in words; None if all are equal."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            path = f"{name}.{key}" if name else key
            inner = first_difference(before.get(key), now.get(key), path)
            if inner is not None:
                return inner
        return None
    return None if before == now else f"there {name}={before!r}, here {now!r}"


@contextmanager
def recording_errors(folder: Path) -> Iterator[None]:
    """Write the message of an error to the job's folder; results of earlier runs are removed."""
    for name in (RESULT, _ERROR):
        (folder / name).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with replacing(folder / _ERROR) as file:
            file.write(f"{error_message(error)}\n\n{traceback.format_exc()}".encode())
        raise


def error_message(error: Exception) -> str:
    """Return the message of an error, with the part of the configuration that it is about."""
    if isinstance(error, MissingMandatoryValue):
        name = str(error.full_key)
        return f"{name} is missing: give {name}=VALUE." + see("commands")
    if not isinstance(error, InstantiationException):
        return str(error) or type(error).__name__
    group = str(error).rpartition("full_key: ")[2]
    cause = error.__cause__
    return f"{group}: {cause if cause is not None else str(error).partition(chr(10))[0]}"


def _natural_key(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in texts by value: "job2" before "job10"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def random_ticket(folder: str, seed: int) -> Ticket:
    """Return a random ticket with the layer densities of the one that a job drew in ``folder``.

    Raises:
        ValueError: if there is no such ticket; the message says which job to run.
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
