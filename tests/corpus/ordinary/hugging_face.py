"""Networks of transformers, with their own losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.corpus.harness import entry
from tests.corpus.modules import SAMPLES, Module, Rows, numbers

VOCABULARY, WIDTH, LENGTH, LABELS = 23, 16, 6, 3
IMAGE = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": LABELS,
}


class Texts(Module):
    """Token ids with padding."""

    layers = ""
    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.net = self.network()

    def network(self) -> nn.Module:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss
        self.log("train_loss", loss, batch_size=SAMPLES)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch).loss, batch_size=SAMPLES)

    @classmethod
    def columns(cls, seed: int) -> dict[str, Tensor]:
        generator = numbers(seed)
        ids = torch.randint(1, VOCABULARY, (2 * SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (len(ids), 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        return {"input_ids": ids, "attention_mask": mask}

    @classmethod
    def labels(cls, columns: dict[str, Tensor]) -> Tensor:
        return columns["input_ids"].where(columns["attention_mask"] > 0, -100)

    @classmethod
    def loader(cls, seed: int) -> Any:
        columns = cls.columns(seed)
        return DataLoader(Rows(**columns, labels=cls.labels(columns)), SAMPLES)


class Classes(Texts):
    @classmethod
    def labels(cls, columns: dict[str, Tensor]) -> Tensor:
        return columns["input_ids"][:, 0] % LABELS


class Pictures(Classes):
    @classmethod
    def columns(cls, seed: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(2 * SAMPLES, 3, 8, 8, generator=numbers(seed))}

    @classmethod
    def labels(cls, columns: dict[str, Tensor]) -> Tensor:
        return columns["pixel_values"].flatten(1)[:, :LABELS].argmax(1)


@entry()
class GPT2(Texts):
    pipeline = "net.transformer.h"

    def network(self) -> nn.Module:
        from tests.parity.networks import gpt2

        return gpt2(2)


@entry()
class BertMasked(Texts):
    pipeline = "net.bert.encoder.layer"

    def network(self) -> nn.Module:
        from tests.parity.networks import bert

        return bert(2)


@entry()
class T5(Texts):
    pipeline = ("net.encoder.block", "net.decoder.block")

    def network(self) -> nn.Module:
        from tests.parity.networks import t5

        return t5(2)


@entry()
class ViT(Pictures):
    pipeline = "net.vit.layers"

    def network(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig(**IMAGE))
