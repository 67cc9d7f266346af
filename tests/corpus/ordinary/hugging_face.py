"""A network of transformers, with its own loss; `tests.parity.test_families` has the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.corpus.harness import entry
from tests.corpus.modules import SAMPLES, Module, Rows, numbers

VOCABULARY, LENGTH = 23, 6


@entry()
class GPT2(Module):
    """Of token ids with padding."""

    pipeline = "net.transformer.h"

    def __init__(self) -> None:
        from tests.parity.networks import gpt2

        super().__init__()
        self.net = gpt2(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss
        self.log("train_loss", loss, batch_size=SAMPLES)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch).loss, batch_size=SAMPLES)

    @classmethod
    def loader(cls, seed: int) -> Any:
        generator = numbers(seed)
        ids = torch.randint(1, VOCABULARY, (2 * SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (len(ids), 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        rows = Rows(input_ids=ids, attention_mask=mask, labels=ids.where(mask > 0, -100))
        return DataLoader(rows, SAMPLES)
