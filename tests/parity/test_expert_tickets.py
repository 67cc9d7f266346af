"""Experts that are spread over ranks are pruned as on one process: by the same masks."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import difference
from tests.parity.test_expert_parallel import HUGGING_FACE, OWN, Mixtral, Own
from tests.parity.test_tensor_tickets import EARLY, F64, GRADUAL, RATIO, Found, Row, run
from tests.ranks import run_ranks


class Adam(Mixtral):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


ROWS: dict[str, Row] = {
    "gradual": (Own, OWN, GRADUAL, F64),
    "slices": (Mixtral, HUGGING_FACE, GRADUAL, F64),
    "by saliency, clipped": (Adam, HUGGING_FACE, GRADUAL, {**F64, "gradient_clip_val": 0.05}),
    "early bird": (Mixtral, HUGGING_FACE, EARLY, F64),
}


def on_grid(g_inter: int) -> dict[str, Found]:
    ranks = 2 * g_inter
    return {
        row: run(case, AxoSparseStrategy(g_inter, 2, g_expert=2, **case[1]), ranks, 2)
        for row, case in ROWS.items()
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Found]:
    return {row: run(case, AxoSparseStrategy(1, 2), 1, 1) for row, case in ROWS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("g_inter", [1, 2])
def test_spread_experts_are_pruned_as_on_one_process(g_inter: int, alone: dict[str, Found]) -> None:
    ranks = run_ranks(2 * g_inter, on_grid, g_inter)
    for row in ROWS:
        expected, ticket, _ = alone[row]
        assert ticket.sparsity == pytest.approx(RATIO, abs=1e-3)
        # A replica's loss is that of its part of the batch.
        losses = [fmean(e) for e in zip(*(found[row][0].losses for found in ranks), strict=True)]
        for rank, found in enumerate(ranks):
            record, drawn, kept = found[row]
            record.losses = losses
            assert drawn == ticket, row
            assert difference(record, expected) <= 1e-10, row
            for name in (name for name in kept.sizes if name in ticket.masks):
                mask = ticket.masks[name]
                if name.endswith("_proj") and "experts" in name:
                    mask = mask.chunk(2)[rank // g_inter]
                elif ".experts.experts." in name:
                    mine = int(name.split(".")[4]) // 2 == rank // g_inter
                    mask = mask if mine else mask[:0]
                assert kept.sizes[name] == (int(mask.sum()),), name
