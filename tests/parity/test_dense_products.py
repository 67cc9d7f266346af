"""Products by oneDNN and attention in loops train what one process of Lightning trains.

The layers are wide enough for them, and every rank takes its processor for one of AMD's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.support import attention, dense_products
from tests.parity.cases import Record, difference, recorded, share, trainer
from tests.ranks import run_ranks

WIDTH, TOKENS, BATCH = 192, 64, 8
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + F.gelu(attended.transpose(1, 2).flatten(2))


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def train_dataloader(self) -> DataLoader:
        # Lightning's sampler would shuffle for several replicas.
        data = TensorDataset(
            *torch.randn(2, 3 * BATCH, TOKENS, WIDTH, generator=torch.manual_seed(1))
        )
        return share(self.trainer, data, BATCH)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.head(self.model(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(strategy: Any, ranks: int = 1) -> tuple[Record, Counter[str]]:
    """The record of a run, and how many products and passes of attention ran without MKL."""
    L.seed_everything(0, verbose=False)
    module, calls = Wide(), Counter[str]()
    run = trainer(strategy, ranks, max_epochs=2)
    own_product, own_run = dense_products.onednn_product, attention._run

    def product(*operands: Any) -> Tensor:
        calls["product"] += 1
        return own_product(*operands)

    def attend(name: str, *arguments: Any) -> None:
        calls[name] += 1
        own_run(name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_products, "onednn_product", product)
        patch.setattr(attention, "_run", attend)
        patch.setattr(dense_products, "_amd_with_avx512", lambda: True)
        run.fit(module)
    return recorded(run, module), calls


WAYS: dict[str, dict[str, Any]] = {
    "message-driven": {},
    "1f1b": {"schedule": "1f1b"},
    "recomputed": {"recompute": 1},
}
STAGES = {"2x1": 2, "1x2": 1}
RUN = {"product", "attend", "attend_backward"}


def train_all() -> dict[str, dict[str, tuple[Record, Counter[str]]]]:
    return {
        grid: {name: train(AxoSparseStrategy(stages, 2, **way), 2) for name, way in WAYS.items()}
        for grid, stages in STAGES.items()
    }


@pytest.fixture(scope="module")
def runs() -> list[dict[str, dict[str, tuple[Record, Counter[str]]]]]:
    return run_ranks(2, train_all)


@pytest.fixture(scope="module")
def expected() -> Record:
    record, calls = train("auto")
    assert not calls
    return record


@pytest.mark.slow
@pytest.mark.parametrize("grid", STAGES)
def test_products_without_mkl_are_one_process_and_change_no_bit_among_schedules(
    grid: str, runs: Any, expected: Record
) -> None:
    for records in (found[grid] for found in runs):  # of each rank
        driven, calls = records["message-driven"]
        assert calls.keys() == RUN
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
    assert calls.keys() == RUN
    assert difference(record, expected) < 5e-7
