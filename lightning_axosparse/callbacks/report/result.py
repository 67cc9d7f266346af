"""Holds the final numbers of a run, as one line of JSON, which sweeps and comparisons read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_axosparse.callbacks.period import Period
from lightning_axosparse.callbacks.report.facts import RankFacts, RunFacts, Work, perplexity
from lightning_axosparse.support.files import replacing


@dataclass(frozen=True)
class RunResult:
    """The final numbers of a run.

    Attributes:
        settings: what the run was made of, as plain values.
        steps: optimizer steps.
        stages, replicas: the grid.
        parameters: number of the model's parameters, before pruning.
        train_loss: of the last batch, the mean over the replicas, in nats per byte.
        dense_validation_loss: of the last validation before the draw, in nats per byte.
        validation_loss: of the last validation; None without validation.
        test_loss: None if the run was not tested.
        validation_accuracy, test_accuracy: likewise; None as well if the model does not classify.
        draw_step: number of optimizer steps after which the ticket was drawn; None without a draw.
        density: fraction kept of all pruned weights; 1 if nothing was pruned.
        densities: fraction kept of each pruned weight.
        state_bytes: the model state of each rank, with dense and with sparse weights.
        reduced_bytes: what each rank all-reduces in a step, likewise.
        step_seconds: the mean step of each rank, likewise.
    """

    steps: int
    stages: int
    replicas: int
    parameters: int
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
        """Write the numbers, with the perplexities, as one line of JSON; atomically."""
        content = {
            "validation_perplexity": self.validation_perplexity,
            "test_perplexity": self.test_perplexity,
            **asdict(self),
        }
        with replacing(path) as file:
            file.write(f"{json.dumps(content)}\n".encode())

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read the numbers that :meth:`save` wrote."""
        content = json.loads(path.read_text())
        return cls(**{name.name: content[name.name] for name in fields(cls)})


def _by_period(ranks: list[RankFacts], number: Callable[[Work], Any]) -> dict[Period, list[Any]]:
    """Return a number of each rank in each period that there was."""
    periods = {period: None for rank in ranks for period in rank.work}
    return {
        period: [number(rank.work[period]) for rank in ranks if period in rank.work]
        for period in periods
    }
