"""x-transformers: a language model as its README trains it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.clients.same import GRIDS, STEPS, assert_replicas_same, assert_same

x_transformers = pytest.importorskip("x_transformers")

TOKENS, LENGTH, BATCH = 32, 12, 4


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = x_transformers.Decoder(dim=24, depth=3, heads=2, rotary_pos_emb=True)
        self.net = x_transformers.AutoregressiveWrapper(
            x_transformers.TransformerWrapper(
                num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=layers
            )
        )

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(ids)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(**options: Any) -> None:
    ids = torch.randint(TOKENS, (2 * STEPS * BATCH, LENGTH + 1))
    L.Trainer(**options).fit(Language(), DataLoader(ids, BATCH))


@pytest.mark.parametrize("grid", GRIDS)
def test_it_prunes_as_masked_training(grid: str) -> None:
    assert_same(train, grid)


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(train)
