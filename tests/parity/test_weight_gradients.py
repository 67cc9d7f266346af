"""Weight gradients that are made while a stage waits are those of its backward passes, to the bit.

Both are trained on the same ranks. That one of them does what one process does is what the other
tests of this folder show.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_axosparse import EarlyBirdTicket
from tests.parity.cases import FEATURES, Net, Record, difference, fit, trainer
from tests.ranks import run_ranks


class Mixed(Net):
    """Linear layers, a convolution, dropout, a head outside the layers that all stages hold."""

    def __init__(self) -> None:
        super().__init__(outer=True)
        width = 24
        self.model = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.Dropout(0.1)),
            nn.Sequential(nn.Unflatten(-1, (4, 6)), nn.Conv1d(4, 8, 3, padding=1), nn.Flatten(-2)),
            nn.Sequential(nn.Tanh(), nn.Linear(2 * width, width, bias=False)),
            nn.Linear(width, width),
            nn.Sequential(nn.Dropout(0.1), nn.Linear(width, FEATURES)),
        )
        self.head = nn.Linear(FEATURES, 5)

    def forward(self, x: Any) -> Any:
        return self.head(super().forward(x))


# Row: (ranks, strategy, trainer).
ROWS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "2x1 clipped, accumulated": (
        2,
        {"g_inter": 2},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    ),
    "2x1 bf16-mixed, ticket": (2, {"g_inter": 2}, {"precision": "bf16-mixed", "ticket": True}),
    "2x1 16-mixed": (2, {"g_inter": 2}, {"precision": "16-mixed"}),
    "2x1 offloaded": (2, {"g_inter": 2, "offload_optimizer": True}, {}),
    "1x2": (2, {"g_inter": 1, "microbatches": 3}, {}),
    "4x1 clipped": (4, {"g_inter": 4, "microbatches": 8}, {"gradient_clip_val": 0.05}),
    "4x1, one in flight": (4, {"g_inter": 4, "in_flight": 1}, {}),
    "2x2 clipped, ticket": (4, {"g_inter": 2}, {"gradient_clip_val": 0.05, "ticket": True}),
    "2x2 accumulated": (4, {"g_inter": 2}, {"accumulate_grad_batches": 2}),
}
TOGETHER = {"schedule": "together"}
DEFERRED = {"schedule": "deferred"}
FASTEST = {"schedule": "message-driven"}
"""All ways in turn, then the fastest one."""


def train(row: str, arguments: dict[str, Any], **more: Any) -> tuple[Record, float]:
    """The record of a run, and the seconds of its weight gradients."""
    from lightning_axosparse import AxoSparseStrategy
    from lightning_axosparse.support.trace import clock

    ranks, strategy, options = ROWS[row]
    options = {"max_epochs": 2, "limit_val_batches": 0, **options, **more}
    if options.pop("ticket", False):
        options["callbacks"] = [
            EarlyBirdTicket(0.6, method="early-bird", draw_after="1 epoch", draw_by="1 epoch")
        ]
    if options.get("precision") == "16-mixed":  # by its name, Lightning would take bf16-mixed
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options["plugins"] = [MixedPrecision(options.pop("precision"), "cpu", scaler)]
    L.seed_everything(0, verbose=False)
    clock.totals.clear()
    run = trainer(AxoSparseStrategy(**{**strategy, **arguments}), ranks, **options)
    return fit(run, Mixed()), clock.totals["weight gradient"]


def train_by_times(row: str) -> tuple[list[tuple[Record, float]], bool]:
    """A run long enough for a choice, made together and by choice, and whether one was made."""
    from lightning_axosparse.pipeline.choice import ScheduleChoice

    made = []
    choose = ScheduleChoice._choose
    options = {"max_epochs": 12}
    # More than those of which deferral at the end makes weight gradients apart.
    more = {"microbatches": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ScheduleChoice, "_choose", lambda self: made.append(chosen := choose(self)) or chosen
        )
        records = [train(row, way | more, **options) for way in (TOGETHER, FASTEST)]
    return records, len(made) == 1


def train_rows(ranks: int) -> dict[str, list[tuple[Record, float]]]:
    """Every row of so many ranks, with weight gradients made together and deferred."""
    return {
        row: [train(row, way) for way in (TOGETHER, DEFERRED | ROWS[row][1])]
        for row, (needs, *_) in ROWS.items()
        if needs == ranks
    }


@pytest.fixture(scope="module")
def runs() -> dict[int, list[Any]]:
    return {ranks: run_ranks(ranks, train_rows, ranks) for ranks in (2, 4)}


@pytest.mark.parametrize("row", ROWS)
def test_deferred_weight_gradients_change_no_bit(row: str, runs: Any) -> None:
    ranks, *_ = ROWS[row]
    for found in runs[ranks]:
        (expected, never), (record, seconds) = found[row]
        assert never == 0 < seconds
        assert len(expected.losses) >= 6
        assert difference(expected, record) == 0


def test_the_choice_by_times_changes_no_bit() -> None:
    for ((expected, never), (record, seconds)), chosen in run_ranks(
        2, train_by_times, "2x1 clipped, accumulated"
    ):
        assert never == 0 < seconds
        assert len(expected.losses) > 24
        assert chosen
        assert difference(expected, record) == 0


def loopback(**arguments: Any) -> tuple[Record, float]:
    from lightning_axosparse import AxoSparseStrategy
    from lightning_axosparse.support.trace import clock

    L.seed_everything(0, verbose=False)
    clock.totals.clear()
    strategy = AxoSparseStrategy(g_inter=3, transport="loopback", **arguments)
    return fit(trainer(strategy, max_epochs=1), Mixed()), clock.totals["weight gradient"]


def test_all_stages_in_one_process_defer_too() -> None:
    expected, _ = loopback(schedule="together")
    record, seconds = loopback(schedule="deferred")
    assert seconds > 0
    assert difference(expected, record) == 0
