"""Two stages train in every precision, with sparse weights, as one process does."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_axosparse import AxoSparseStrategy, GradualPruning
from lightning_axosparse.pruning import Ticket
from tests.parity.cases import Net, Record, difference, fit, trainer
from tests.parity.rows import rows_in_process, rows_on_ranks

ROWS: dict[str, dict[str, Any]] = {
    "32-true": {"compute": "samo"},
    "bf16-mixed": {"compute": "auto", "clip": 0.5},
    "16-mixed": {"compute": "dense", "accumulate": 2},
    "bf16-true": {"compute": "samo", "clip": 0.5},
}


def ticket() -> Ticket:
    generator = torch.Generator().manual_seed(3)
    masks = {
        name: torch.rand(parameter.shape, generator=generator) < 0.4
        for name, parameter in Net().named_parameters()
        if parameter.dim() > 1
    }
    return Ticket(masks, pruning_ratio=0.6)


def train(precision: str, strategy: AxoSparseStrategy, ranks: int) -> Record:
    row = ROWS[precision]
    chosen: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # by its name alone, Lightning would take bf16-mixed on CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        chosen = {"plugins": [MixedPrecision(precision, "cpu", scaler)]}
    L.seed_everything(0, verbose=False)
    run = trainer(
        strategy,
        ranks,
        **chosen,
        gradient_clip_val=row.get("clip"),
        accumulate_grad_batches=row.get("accumulate", 1),
        max_epochs=2,
        callbacks=[GradualPruning(ticket=ticket(), compute=row["compute"])],
    )
    return fit(run, Net())


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Record], list[dict[str, Record]]]:
    """Every row, on one process, and on the ranks of two stages.

    Both compute the same micro-batches, as 16 bits round whole batches otherwise.
    """
    options = {precision: {"microbatches": 4} for precision in ROWS}
    return rows_in_process(2, train, options), rows_on_ranks(2, train, options)


@pytest.mark.parametrize("precision", ROWS)
def test_two_stages_do_what_one_process_does(precision: str, runs: Any) -> None:
    expected, ranks = runs
    record = expected[precision]
    assert record.losses[-1] < record.losses[0]
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert record.weights["model.0.weight"].dtype == dtype
    for found in ranks:
        assert difference(record, found[precision]) <= 1e-6
