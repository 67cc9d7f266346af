"""Products by oneDNN train what one process of Lightning trains, and alike in all ways.

The layers are wide enough for them, and every rank takes its processor for one of AMD's.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.support import dense_products
from tests.parity.cases import Record, difference, recorded, share, trainer
from tests.ranks import run_ranks

WIDTH, BATCH = 192, 512
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        self.model = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def train_dataloader(self) -> DataLoader:
        # Lightning's sampler would shuffle for several replicas.
        data = TensorDataset(*torch.randn(2, 3 * BATCH, WIDTH, generator=torch.manual_seed(1)))
        return share(self.trainer, data, BATCH)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.head(self.model(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(strategy: Any, ranks: int = 1) -> tuple[Record, int]:
    """The record of a run, and how many products ran by oneDNN."""
    L.seed_everything(0, verbose=False)
    module, calls = Wide(), []
    run = trainer(strategy, ranks, max_epochs=2)
    own = dense_products.onednn_product

    def count(*operands: Any) -> Tensor:
        calls.append(1)
        return own(*operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_products, "onednn_product", count)
        patch.setattr(dense_products, "_amd_with_avx512", lambda: True)
        run.fit(module)
    return recorded(run, module), len(calls)


WAYS: dict[str, dict[str, Any]] = {
    "message-driven": {},
    "1f1b": {"schedule": "1f1b"},
    "recomputed": {"recompute": 1},
}
STAGES = {"2x1": 2, "1x2": 1}


def train_all() -> dict[str, dict[str, tuple[Record, int]]]:
    return {
        grid: {name: train(AxoSparseStrategy(stages, 2, **way), 2) for name, way in WAYS.items()}
        for grid, stages in STAGES.items()
    }


@pytest.fixture(scope="module")
def runs() -> list[dict[str, dict[str, tuple[Record, int]]]]:
    return run_ranks(2, train_all)


@pytest.fixture(scope="module")
def expected() -> Record:
    record, calls = train("auto")
    assert calls == 0
    return record


@pytest.mark.slow
@pytest.mark.parametrize("grid", STAGES)
def test_products_without_mkl_are_one_process_and_change_no_bit_among_schedules(
    grid: str, runs: Any, expected: Record
) -> None:
    for records in (found[grid] for found in runs):  # of each rank
        driven, calls = records["message-driven"]
        assert calls > 0
        for name, (record, also) in records.items():
            assert also >= calls, name
            assert difference(record, driven) == 0, name
        if STAGES[grid] == 1:  # a replica's losses are those of its samples
            driven.losses, driven.logged = expected.losses, expected.logged
        assert difference(driven, expected) < 5e-7


def test_one_rank_runs_them_until_its_run_ends(expected: Record) -> None:
    kernels = torch._C._dispatch_dump("aten::mm")
    record, calls = train(AxoSparseStrategy())
    assert torch._C._dispatch_dump("aten::mm") == kernels
    assert calls > 0
    assert difference(record, expected) < 5e-7
