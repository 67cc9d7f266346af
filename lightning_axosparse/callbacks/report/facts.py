"""Holds what a run measured, as plain values: all of it, and its final numbers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
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

    ``steps`` are batches, and ``seconds`` their wall time. ``state`` are the bytes of the model
    state at the end of the period's last epoch, or after its first batch if no epoch ends in it:
    "weights", "indices", "gradients" and "optimizer". ``peak_in_flight`` has for each stage the
    most micro-batches in flight at any time; ``in_flight`` is the highest limit.
    """

    steps: int = 0
    seconds: float = 0.0
    activities: dict[Activity, float] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    reduced_bytes: int = 0
    in_flight: int = 0
    peak_in_flight: dict[int, int] = field(default_factory=dict)

    def add(
        self, seconds: float, spent: Mapping[Activity, float], in_flight: Mapping[int, int]
    ) -> None:
        """Count one more batch: its seconds, those of each activity, and what stages held."""
        self.steps += 1
        self.seconds += seconds
        for activity, time in spent.items():
            self.activities[activity] = self.activities.get(activity, 0.0) + time
        for stage, held in in_flight.items():
            self.peak_in_flight[stage] = max(held, self.peak_in_flight.get(stage, 0))

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole model state."""
        return sum(self.state.values())

    def seconds_per_step(self) -> dict[TimePart, float]:
        """Return the seconds of each part of the mean step; their sum is the whole step."""
        spent = defaultdict[Activity, float](float, self.activities)
        swapping = spent["densify"] + spent["compress"]
        seconds: dict[TimePart, float] = {
            "compute": sum(spent[name] for name in PASSES) - swapping,
            "waiting": spent["wait"],
            "all-reduce": spent["all-reduce"],
            "optimizer": spent["optimizer"],
            "densify, compress": swapping,
        }
        seconds["other"] = self.seconds - sum(seconds.values())
        return {part: value / max(1, self.steps) for part, value in seconds.items()}


@dataclass
class RankFacts:
    """One rank's place in the grid at the end of the run, and what it has measured.

    ``losses`` has the loss of each batch; ``tokens`` counts the text on which it has trained as
    first stage.
    """

    rank: int
    stage: int
    replica: int
    work: dict[Period, Work]
    losses: list[float]
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

    ``step`` is None if it was there from the start; ``channels`` has the channels of each layer
    before and after, where channels were pruned.
    """

    pruning_ratio: float
    sparsity: Mapping[str, float]
    density: float
    step: int | None = None
    channels: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class RunFacts:
    """All facts of a run.

    ``steps`` are the optimizer steps at the end of each batch, ``distances`` the mask distances
    after so many steps, ``parameters`` those before pruning. ``about`` says what has run, and on
    what.
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
    def tokens_a_parameter(self) -> float:
        """The tokens of the training batches for each parameter; 0 if they have no text."""
        return sum(rank.tokens for rank in self.ranks) / max(1, self.parameters)

    @property
    def losses(self) -> list[float]:
        """The training loss of each batch, the mean over the replicas."""
        firsts = [rank.losses for rank in self.ranks if rank.stage == 0]
        return [sum(batch) / len(batch) for batch in zip(*firsts, strict=True)]

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
        """Return the fraction of a period's time that the ranks waited for messages."""
        works = [rank.work[period] for rank in self.ranks if period in rank.work]
        seconds = sum(work.seconds for work in works)
        waited = sum(work.activities.get("wait", 0.0) for work in works)
        return waited / seconds if seconds else None

    def save(self, path: Path) -> None:
        """Write the facts and the quantities derived from them as JSON."""
        content = asdict(self)
        dense, final = self.dense_validation, self.final_validation
        content |= {
            "losses": self.losses,
            "tokens_a_parameter": self.tokens_a_parameter,
            "dense_at_draw": dense and quality(dense.loss, dense.accuracy),
            "final": final and quality(final.loss, final.accuracy),
            "test": self.test_loss and quality(self.test_loss, self.test_accuracy),
        }
        if self.regrid is not None:
            content["regrid"]["bubbles"] = self.regrid.bubbles
        for rank, facts in zip(content["ranks"], self.ranks, strict=True):
            for period, work in facts.work.items():
                rank["work"][period]["seconds_per_step"] = work.seconds_per_step()
        path.write_text(json.dumps(content, indent=2) + "\n")


def quality(loss: float, accuracy: float | None = None) -> dict[str, float]:
    """Return a mean loss in the units in which models are compared; that of text is in nats."""
    if accuracy is not None:
        return {"loss": loss, "accuracy": accuracy}
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
    """Return the perplexity of a mean loss in nats; infinite where training has diverged."""
    return math.exp(loss) if loss < 700 else loss * math.inf


@dataclass(frozen=True)
class RunResult:
    """The final numbers of a run, and the settings that it was made of.

    Losses are in nats per byte; that of training is the last batch's, the mean over the replicas.
    What has no data is None, such as an accuracy of a model that does not classify. The last three
    numbers are those of each rank, with dense and with sparse weights.
    """

    steps: int
    stages: int
    replicas: int
    parameters: int
    tokens_a_parameter: float
    train_loss: float | None
    dense_validation_loss: float | None
    validation_loss: float | None
    test_loss: float | None
    validation_accuracy: float | None
    test_accuracy: float | None
    draw_step: int | None
    density: float
    densities: Mapping[str, float]
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
            tokens_a_parameter=facts.tokens_a_parameter,
            train_loss=facts.losses[-1] if facts.losses else None,
            dense_validation_loss=None if dense is None else dense.loss,
            validation_loss=None if final is None else final.loss,
            test_loss=facts.test_loss,
            validation_accuracy=None if final is None else final.accuracy,
            test_accuracy=facts.test_accuracy,
            draw_step=None if draw is None else draw.step,
            density=1.0 if draw is None else draw.density,
            densities={} if draw is None else {n: 1 - s for n, s in draw.sparsity.items()},
            state_bytes=_by_period(facts.ranks, lambda work: work.state_bytes),
            reduced_bytes=_by_period(facts.ranks, lambda work: work.reduced_bytes),
            step_seconds=_by_period(facts.ranks, lambda work: work.seconds / max(1, work.steps)),
            settings=settings,
        )

    @property
    def period(self) -> Period:
        """How the weights were stored at the end."""
        return "sparse" if "sparse" in self.state_bytes else "dense"

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
    """Return a number of each rank in each period that there was."""
    periods = {period: None for rank in ranks for period in rank.work}
    return {
        period: [number(rank.work[period]) for rank in ranks if period in rank.work]
        for period in periods
    }
