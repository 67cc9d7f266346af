"""Experts that are spread over ranks are pruned as on one process: by the same masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import difference, mean_losses
from tests.parity.test_expert_parallel import HUGGING_FACE, OWN, Mixtral, Own, Qwen, spread
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
    "Qwen": (Qwen, HUGGING_FACE, GRADUAL, F64),
}


# With a tensor group, some of those whose module has a plan for it.
GRIDS = {(1, 1): list(ROWS), (2, 2): ["by saliency, clipped", "early bird", "Qwen"]}


def on_grid(g_inter: int, g_tensor: int) -> dict[str, Found]:
    found = {}
    for row in GRIDS[g_inter, g_tensor]:
        case = ROWS[row]
        options = spread(2, case[1])
        strategy = AxoSparseStrategy(g_inter, 2, tensor_parallel=g_tensor, **options)
        found[row] = run(case, strategy, 2 * g_inter * g_tensor)
    return found


def _split(name: str) -> int | None:
    """The dimension along which a tensor group splits a weight, by the plans of these modules."""
    if any(each in name for each in ("q_proj", "k_proj", "v_proj", "lm_head", "embed_tokens")):
        return 0
    return 1 if "o_proj" in name else None


@pytest.fixture(scope="module")
def alone() -> dict[str, Found]:
    return {row: run(case, AxoSparseStrategy(1, 2), 1) for row, case in ROWS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("g_inter", "g_tensor"), GRIDS)
def test_spread_experts_are_pruned_as_on_one_process(
    g_inter: int, g_tensor: int, alone: dict[str, Found]
) -> None:
    replica = g_inter * g_tensor
    ranks = run_ranks(2 * replica, on_grid, g_inter, g_tensor)
    for row in ranks[0]:
        expected, ticket, _ = alone[row]
        assert ticket.sparsity == pytest.approx(RATIO, abs=1e-3)
        losses = mean_losses(found[row][0] for found in ranks)
        for rank, found in enumerate(ranks):
            record, drawn, kept = found[row]
            record.losses = losses
            assert drawn == ticket, row
            assert difference(record, expected) <= 1e-10, row
            for name in (name for name in kept.sizes if name in ticket.masks):
                mask = ticket.masks[name]
                if name.endswith("_proj") and "experts" in name:
                    mask = mask.chunk(2)[rank // replica]
                elif ".experts.experts." in name:
                    mine = int(name.split(".")[4]) // 2 == rank // replica
                    mask = mask if mine else mask[:0]
                elif g_tensor > 1 and (along := _split(name)) is not None:
                    mask = mask.chunk(g_tensor, along)[rank // g_inter % g_tensor]
                assert kept.sizes[name] == (int(mask.sum()),), name
