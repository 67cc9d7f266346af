"""Optimizer state that is divided over the ranks that keep the same parts of weights.

Training goes on to the same bits as without, also from files of one way in the other. All rows run
in one job, because starting ranks takes longer than a row.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_axosparse import AxoSparseStrategy
from tests.parity import test_expert_parallel as experts
from tests.parity.cases import difference
from tests.parity.test_expert_tickets import Adam as Mixtral
from tests.parity.test_tensor_tickets import F64, GRADUAL, RATIO, Found, Row, run
from tests.parity.test_tensor_tickets import Adam as Tensors
from tests.ranks import PATIENCE, run_ranks

RANKS = 4


def upper_half(weight: torch.Tensor, state: Any) -> torch.Tensor:
    """Scores that keep few entries of the second rank's rows, which are not worth dividing."""
    rows = torch.arange(len(weight)) < len(weight) // 2
    return weight.abs() + rows[:, None]


class Listed(experts.Own):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


TENSOR = {"tensor_parallel": 2, "pipeline": "blocks"}
EXPERTS = {"expert_parallel": 2, "pipeline": "network.model.layers"}
# Row: module, strategy, callback, trainer.
ROWS: dict[str, Row] = {
    "tensor": (Tensors, TENSOR, GRADUAL, F64),
    "unlike parts": (Tensors, TENSOR, partial(GRADUAL, score=upper_half), F64),
    "listed experts": (Listed, experts.spread(2, experts.OWN), GRADUAL, F64),
    "both": (Mixtral, {**EXPERTS, "tensor_parallel": 2}, GRADUAL, F64),
    # Clipping reads whole gradients.
    "clipped": (Mixtral, {"g_inter": 2, **EXPERTS}, GRADUAL, {**F64, "gradient_clip_val": 0.05}),
}


RESUMED = {"listed experts", "both"}


def both_ways(row: str, folder: Path) -> list[Found]:
    """Undivided and divided, and in some rows each from the first epoch's file of the other."""
    case = ROWS[row]
    found = []
    for resumes in (False, True) if row in RESUMED else (False,):
        for divides in (False, True):
            strategy = AxoSparseStrategy(microbatches=2, shard_optimizer=divides, **case[1])
            if resumes:
                path = folder / str(not divides) / "epoch=0.ckpt"
                found.append(run(case, strategy, RANKS, ckpt_path=path))
            else:
                found.append(run(case, strategy, RANKS, folder / str(divides)))
    return found


def replicas(options: dict[str, Any]) -> int:
    return RANKS // options.get("g_inter", 1) // options.get("tensor_parallel", 1)


def train_rows(folder: Path) -> dict[str, list[Found]]:
    return {row: both_ways(row, folder / row) for row in ROWS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Found]]]:
    return run_ranks(RANKS, train_rows, tmp_path_factory.mktemp("rows"))


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("row", ROWS)
def test_training_goes_on_to_the_same_bits_with_a_part_of_the_state(row: str, runs: Any) -> None:
    ranks = [found[row] for found in runs]
    for whole, *others in ranks:
        assert whole[1].sparsity == pytest.approx(RATIO, abs=1e-3)
        assert difference(others[0][0], whole[0]) == 0
        for record, ticket, kept in others:
            assert ticket == whole[1]
            assert kept.whole == whole[2].whole
            assert record.losses == whole[0].losses[-len(record.losses) :]
            torch.testing.assert_close(record.weights, whole[0].weights, rtol=0, atol=0)
    assert_divided(ranks, ROWS[row][1])


def assert_divided(ranks: list[list[Found]], options: dict[str, Any]) -> None:
    """Of each large parameter, the ranks that keep the same of it have the state once together."""
    g_inter, g_data, divided = options.get("g_inter", 1), replicas(options), 0
    spread_over = 2 if "expert_parallel" in options else 1
    of_experts = g_data // spread_over * options.get("tensor_parallel", 1)
    for stage in range(g_inter):
        of_stage = ranks[stage::g_inter]
        for place, name in enumerate(of_stage[0][0][2].sizes):
            sharing = of_experts if ".experts." in name else g_data
            whole, parts = (
                [found[way][2].states[place].get("exp_avg", 0) for found in of_stage]
                for way in (0, 1)
            )
            # In a list, ranks have nothing of other ranks' experts.
            if min((size for size in whole if size), default=0) >= 64 * sharing:
                assert sum(parts) * sharing == sum(whole), name
                divided += sharing > 1
    assert divided
