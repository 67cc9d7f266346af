"""The in-flight limit is what memory allows, and is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.pipeline import choice as limits
from lightning_axosparse.pipeline.choice import MemoryInFlightLimit
from lightning_axosparse.sparse.module.parameters import layouts
from tests.parity.cases import Net, Record, difference, fit, trainer
from tests.ranks import run_ranks

CPU = torch.device("cpu")
KEPT = 400


def limit(free: int, others: list[Any] | None = None, stages: int = 4) -> MemoryInFlightLimit:
    state = {"steps": 0, "free": free}
    measured = lambda: state["free"], lambda: state["steps"]
    made = MemoryInFlightLimit(stages, CPU, *measured, lambda room: [room, *(others or [])])
    made.state = state  # type: ignore[attr-defined]
    return made


def batch(made: MemoryInFlightLimit, stages: int = 1, steps: int = 1) -> int:
    """Run a batch in which every stage keeps ``KEPT`` bytes; the limit that it ran at."""
    made.begin_batch()
    for stage in range(stages):
        kept = []
        for _ in range(3):
            with made.measured(stage, None):
                kept.append(torch.empty(KEPT // 4))
    made.state["steps"] += steps  # type: ignore[attr-defined]
    return made.value


@pytest.mark.parametrize(
    ("free", "expected"),
    [(0, 4), (4 * KEPT, 4), (6 * KEPT - 1, 5), (6 * KEPT, 6), (8 * KEPT, 8), (99 * KEPT, 8)],
)
def test_the_second_batch_runs_at_what_fits(free: int, expected: int) -> None:
    made = limit(free)
    assert [batch(made) for _ in range(3)] == [4, expected, expected]
    assert made.largest == 8


def test_all_stages_of_a_process_share_its_memory() -> None:
    made = limit(12 * KEPT)
    assert [batch(made, stages=2) for _ in range(2)] == [4, 6]


def test_the_rank_with_the_least_room_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(limits, "rank_zero_debug", logged.append)
    made = limit(99 * KEPT, [limits.Capacity(5, 2_000_000, 10_000_000)])
    assert [batch(made) for _ in range(3)] == [4, 5, 5]
    assert logged == [
        "At most 5 micro-batches in flight: rank 1 uses 2.0 MB per micro-batch; 0.0 GB free."
    ]


def test_the_optimizer_takes_its_memory_first() -> None:
    made = limit(99 * KEPT)
    assert [batch(made, steps=0) for _ in range(3)] == [4, 4, 4]
    batch(made)
    assert batch(made) == 8


def test_free_memory_is_read_when_a_batch_holds_more_than_any_before() -> None:
    read: list[int] = []

    def free() -> int:
        read.append(9 * KEPT)
        return read[-1]

    made = MemoryInFlightLimit(4, CPU, free, lambda: 0, lambda room: [room])
    made.begin_batch()
    with made.measured(0, None):
        kept = torch.empty(KEPT // 4)
    del kept
    counts = []
    for held in (8, 8, 4, 9, 9):
        made.begin_batch(held)
        counts.append(len(read))
    assert counts == [2, 2, 2, 3, 3]
    with pytest.raises(MisconfigurationException, match="has to hold 10 micro-batches more"):
        made.begin_batch(10)


def test_it_is_measured_again_where_memory_was_freed() -> None:
    made = limit(0)
    assert [batch(made) for _ in range(2)] == [4, 4]
    made.state["free"] = 99 * KEPT  # type: ignore[attr-defined]
    assert batch(made) == 4
    made.measure_again()
    assert [batch(made) for _ in range(2)] == [4, 8]


class Prune(L.Callback):
    """Prunes at the second epoch, and notes the limit and the peak of every batch."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            held = trainer.strategy.local_parameters()
            trainer.strategy.sparsify({n: p > -0.05 for n, p in held.items() if p.dim() > 1})
            trainer.strategy.use_freed_memory()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        strategy = trainer.strategy
        self.noted.append((strategy.in_flight, max(strategy.peak_in_flight.values())))


class SlowEnd(Net):
    """The last stage lags, so that the first one fills up to its limit."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        sleep(0.005)
        return loss


def train(
    free: Callable[[bool], float], ranks: int, **options: Any
) -> tuple[Record, list[tuple[int, int]]]:
    """Train with what ``free`` says is free before, and after, the pruning."""
    from lightning_axosparse import AxoSparseStrategy
    from lightning_axosparse.strategy import states

    L.seed_everything(0, verbose=False)
    module, prune = SlowEnd(), Prune()
    states.free_bytes = lambda device, replicas_per_batch: int(free(bool(layouts(module))))
    grid = AxoSparseStrategy(g_inter=2, microbatches=8, loss="mean", **options)
    return fit(trainer(grid, ranks, callbacks=[prune], max_epochs=2), module), prune.noted


CASES: dict[str, tuple[Callable[[bool], float], dict[str, Any], list[int]]] = {
    "no memory": (lambda pruned: 0, {}, [2, 2, 2, 2]),
    "plenty": (lambda pruned: 1e12, {}, [2, 4, 4, 4]),
    "freed by pruning": (lambda pruned: 1e12 if pruned else 0, {}, [2, 2, 2, 4]),
    "asked for": (lambda pruned: 0, {"in_flight": 7}, [7, 7, 7, 7]),
}
NOTED = [0, 1, 6, 7]  # the first two batches of each epoch


def train_cases(names: list[str], ranks: int, **options: Any) -> dict[str, Any]:
    return {name: train(CASES[name][0], ranks, **CASES[name][1], **options) for name in names}


@pytest.mark.parametrize("transport", ["mpi", "loopback"])
def test_peaks_follow_memory_and_numbers_do_not(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "mpi":
        results = run_ranks(2, train_cases, list(CASES), 2)
    else:
        from lightning_axosparse.strategy import states

        monkeypatch.setattr(states, "free_bytes", states.free_bytes)
        results = [train_cases(["no memory", "freed by pruning"], 1, transport="loopback")]
    first = results[-1]  # The last rank has the first stage.
    for runs in results:
        for name, (record, noted) in runs.items():
            expected = CASES[name][2]
            assert [noted[number][0] for number in NOTED] == expected
            assert difference(record, first["no memory"][0]) == 0
    for name, (_, noted) in first.items():
        assert [noted[number][1] for number in NOTED] == CASES[name][2]
