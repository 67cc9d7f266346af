"""The measurements of a run as plain values: those of every rank and step, and the final ones."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args
from zlib import crc32

from lightning_axosparse.callbacks.ticket_callback import Period
from lightning_axosparse.strategy.regrid import Regridded
from lightning_axosparse.support.files import CorruptFileError, reading, replacing
from lightning_axosparse.support.trace import PASSES, Activity

TimePart = Literal["compute", "waiting", "all-reduce", "optimizer", "densify, compress", "other"]
"""A part of a step's time: see :meth:`Work.seconds_per_step`."""


@dataclass
class Work:
    """Time and memory of one rank in one period of the training.

    Attributes:
        steps: number of batches.
        seconds: their wall time.
        activities: seconds of each activity.
        state: bytes of the model state ("weights", "indices", "gradients" and "optimizer") at the
            end of the period's last epoch, or after its first batch if no epoch ends in it.
        reduced_bytes: bytes of the gradients in one all-reduce.
        in_flight: the highest in-flight limit.
        peak_in_flight: stage -> the most micro-batches in flight at any time.
    """

    steps: int = 0
    seconds: float = 0.0
    activities: dict[Activity, float] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    reduced_bytes: int = 0
    in_flight: int = 0
    peak_in_flight: dict[int, int] = field(default_factory=dict)

    def add(
        self, seconds: float, activities: Mapping[Activity, float], in_flight: Mapping[int, int]
    ) -> None:
        """Count one more batch: its seconds, those of each activity, and the stages' peaks."""
        self.steps += 1
        self.seconds += seconds
        for activity, time in activities.items():
            self.activities[activity] = self.activities.get(activity, 0.0) + time
        for stage, peak in in_flight.items():
            self.peak_in_flight[stage] = max(peak, self.peak_in_flight.get(stage, 0))

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole model state."""
        return sum(self.state.values())

    def seconds_per_step(self) -> dict[TimePart, float]:
        """Return the mean seconds of each part of a step; their sum is the time of a step.

        Densifying and compressing happen within passes: of 10 ms of passes with 2 ms of densifying,
        8 ms are "compute" and 2 ms are "densify, compress". "other" is the remaining time.
        """
        total = defaultdict[Activity, float](float, self.activities)
        converting = total["densify"] + total["compress"]
        seconds: dict[TimePart, float] = {
            "compute": sum(total[name] for name in PASSES) - converting,
            "waiting": total["wait"],
            "all-reduce": total["all-reduce"],
            "optimizer": total["optimizer"],
            "densify, compress": converting,
        }
        seconds["other"] = self.seconds - sum(seconds.values())
        return {part: value / max(1, self.steps) for part, value in seconds.items()}


@dataclass
class RankFacts:
    """One rank's position in the grid at the end of the run, and its measurements.

    ``losses`` has the loss of each batch, None where a step returned none; ``tokens`` is the number
    of tokens of the batches that the rank has trained on as first stage.
    """

    rank: int
    stage: int
    replica: int
    work: dict[Period, Work]
    losses: list[float | None]
    tokens: float = 0


@dataclass(frozen=True)
class ValidationLoss:
    """The mean loss over the validation data after ``step`` optimizer steps, and the accuracy.

    The loss of a language model is in nats per byte; only a model that classifies has an accuracy.
    """

    epoch: int
    step: int
    loss: float
    period: Period
    accuracy: float | None = None


@dataclass(frozen=True)
class TicketDraw:
    """The pruning by a ticket, and when the ticket was drawn.

    ``sparsity`` has the pruned fraction of each weight, ``density`` the unpruned fraction of all.
    ``step`` is None if the ticket was given. ``channels`` has the channels of each layer before and
    after, for a ticket of channels.
    """

    pruning_ratio: float
    sparsity: Mapping[str, float]
    density: float
    step: int | None = None
    channels: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class RunFacts:
    """All facts of a run.

    ``steps`` has the number of optimizer steps at the end of each batch, ``distances`` the mask
    distance after a number of steps. ``parameters`` is their number before pruning. ``about`` has
    the command, the model, the grid, the seed, the versions and the date.
    """

    ranks: list[RankFacts]
    steps: list[int]
    validations: list[ValidationLoss]
    distances: dict[int, float] = field(default_factory=dict)
    threshold: float | None = None
    draw: TicketDraw | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    regrid: Regridded | None = None
    parameters: int = 0
    about: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_per_parameter(self) -> float:
        """The tokens of all training batches, divided by the parameters; 0 for other data."""
        return sum(rank.tokens for rank in self.ranks) / max(1, self.parameters)

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each batch: the mean over the replicas that have one."""
        firsts = [rank.losses for rank in self.ranks if rank.stage == 0]
        batches = [[x for x in batch if x is not None] for batch in zip(*firsts, strict=True)]
        return [fmean(batch) if batch else None for batch in batches]

    @property
    def dense_validation(self) -> ValidationLoss | None:
        """The last validation before the draw."""
        dense = [v for v in self.validations if v.period == "dense"]
        return dense[-1] if self.draw and dense else None

    @property
    def final_validation(self) -> ValidationLoss | None:
        """The last validation of the run."""
        return self.validations[-1] if self.validations else None

    def waiting(self, period: Period) -> float | None:
        """Return the fraction of a period in which ranks waited for messages; None if none ran."""
        works = [rank.work[period] for rank in self.ranks if period in rank.work]
        seconds = sum(work.seconds for work in works)
        waiting = sum(work.activities.get("wait", 0.0) for work in works)
        return waiting / seconds if seconds else None

    def save(self, path: Path) -> None:
        """Write the facts and the quantities derived from them as JSON."""
        content = asdict(self)
        dense, final = self.dense_validation, self.final_validation
        content |= {
            "losses": self.losses,
            "tokens_per_parameter": self.tokens_per_parameter,
            "dense_at_draw": dense and self._quality(dense.loss, dense.accuracy),
            "final": final and self._quality(final.loss, final.accuracy),
            "test": self._quality(self.test_loss, self.test_accuracy),
        }
        if self.regrid is not None:
            content["regrid"]["bubbles"] = self.regrid.bubbles
        for rank, facts in zip(content["ranks"], self.ranks, strict=True):
            for period, work in facts.work.items():
                rank["work"][period]["seconds_per_step"] = work.seconds_per_step()
        path.write_text(json.dumps(content, indent=2) + "\n")

    def _quality(self, loss: float | None, accuracy: float | None) -> dict[str, float] | None:
        """Return a mean loss with the accuracy, if there is one, else in the units for text."""
        if loss is None:
            return None
        if accuracy is not None:
            return {"loss": loss, "accuracy": accuracy}
        if not self.tokens_per_parameter:
            return {"loss": loss}
        return {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": loss / math.log(2)}


LONG = 20
"""Tokens per parameter of runs in which the cost of pruning is measured (``docs/tickets.md``)."""


def too_short(tokens: float) -> str:
    """Say so if a training on text had too few tokens per parameter to judge quality, else ""."""
    if not 0 < tokens < LONG / 2:
        return ""
    return (
        f"Too short to judge quality: {tokens:.2g} tokens per parameter, about {LONG} are needed."
    )


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; infinity for a loss that has diverged."""
    return math.exp(loss) if loss < 700 else loss * math.inf


@dataclass(frozen=True)
class RunResult:
    """The final numbers of a run, and its settings.

    Losses are in nats per byte. ``train_loss`` is that of the last batch that has one, averaged
    over replicas. A number without data is None, such as the accuracy of a model that does not
    classify. ``state_bytes``, ``reduced_bytes`` and ``step_seconds`` have one number per rank.
    """

    steps: int
    stages: int
    replicas: int
    parameters: int
    tokens_per_parameter: float
    train_loss: float | None
    dense_validation_loss: float | None
    validation_loss: float | None
    test_loss: float | None
    validation_accuracy: float | None
    test_accuracy: float | None
    draw_step: int | None
    density: float
    state_bytes: Mapping[Period, list[int]]
    reduced_bytes: Mapping[Period, list[int]]
    step_seconds: Mapping[Period, list[float]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: RunFacts, settings: Mapping[str, Any]) -> RunResult:
        """Return the final numbers among a run's facts."""
        dense, final, draw = facts.dense_validation, facts.final_validation, facts.draw
        return cls(
            steps=facts.steps[-1] if facts.steps else 0,
            stages=1 + max(rank.stage for rank in facts.ranks),
            replicas=1 + max(rank.replica for rank in facts.ranks),
            parameters=facts.parameters,
            tokens_per_parameter=facts.tokens_per_parameter,
            train_loss=next((loss for loss in facts.losses[::-1] if loss is not None), None),
            dense_validation_loss=None if dense is None else dense.loss,
            validation_loss=None if final is None else final.loss,
            test_loss=facts.test_loss,
            validation_accuracy=None if final is None else final.accuracy,
            test_accuracy=facts.test_accuracy,
            draw_step=None if draw is None else draw.step,
            density=1.0 if draw is None else draw.density,
            state_bytes=_by_period(facts.ranks, lambda work: work.state_bytes),
            reduced_bytes=_by_period(facts.ranks, lambda work: work.reduced_bytes),
            step_seconds=_by_period(facts.ranks, lambda work: work.seconds / max(1, work.steps)),
            settings=settings,
        )

    @property
    def period(self) -> Period:
        """The last period of the training; "dense" if it had no batch."""
        ran = [period for period in get_args(Period) if period in self.state_bytes]
        return ran[-1] if ran else "dense"

    @property
    def largest_state_bytes(self) -> int | None:
        """The model state of the largest rank in the last period; None without a batch."""
        return max(self.state_bytes.get(self.period, ()), default=None)

    @property
    def largest_reduced_bytes(self) -> int | None:
        """The all-reduced bytes of the rank with most in the last period; None without a batch."""
        return max(self.reduced_bytes.get(self.period, ()), default=None)

    def step_milliseconds(self, period: Period) -> float | None:
        """Return the time of a step, averaged over ranks; None if the period had no batch."""
        return 1e3 * fmean(self.step_seconds[period]) if period in self.step_seconds else None

    @property
    def validation_perplexity(self) -> float | None:
        """The perplexity of the validation text at the end."""
        return None if self.validation_loss is None else perplexity(self.validation_loss)

    @property
    def test_perplexity(self) -> float | None:
        """The perplexity of the test text."""
        return None if self.test_loss is None else perplexity(self.test_loss)

    def save(self, path: Path) -> None:
        """Write the numbers, the perplexities and a checksum as one line of JSON; atomically."""
        content = {
            "validation_perplexity": self.validation_perplexity,
            "test_perplexity": self.test_perplexity,
            **asdict(self),
        }
        content["crc32"] = _checksum(content)
        with replacing(path) as file:
            file.write(f"{json.dumps(content)}\n".encode())

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read the numbers that :meth:`save` wrote.

        Raises:
            CorruptFileError: if the file is not as it was written.
        """
        with reading(path):
            content = json.loads(path.read_text())
            if content.pop("crc32") != _checksum(content):
                raise CorruptFileError("its checksum does not fit")
            return cls(**{name.name: content[name.name] for name in fields(cls)})


def _checksum(content: Mapping[str, Any]) -> int:
    return crc32(json.dumps(content).encode())


def _by_period(ranks: list[RankFacts], number: Callable[[Work], Any]) -> dict[Period, list[Any]]:
    """Return a number of each rank, for each period of the training."""
    periods = {period: None for rank in ranks for period in rank.work}
    return {
        period: [number(rank.work[period]) for rank in ranks if period in rank.work]
        for period in periods
    }
