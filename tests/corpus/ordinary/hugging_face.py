"""Networks of transformers, with their own losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.corpus.harness import entry
from tests.corpus.modules import SAMPLES, Module, Rows, numbers

VOCABULARY, WIDTH, LENGTH, LABELS = 23, 16, 6, 3
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": LABELS,
}
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
class Llama(Texts):
    pipeline = "net.model.layers"

    def network(self) -> nn.Module:
        from tests.parity.networks import llama

        return llama(2)


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
class BertClasses(Classes):
    pipeline = "net.bert.encoder.layer"

    def network(self) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(BertConfig(**TEXT))


@entry()
class BertTokens(Texts):
    pipeline = "net.bert.encoder.layer"

    def network(self) -> nn.Module:
        from transformers import BertConfig, BertForTokenClassification

        return BertForTokenClassification(BertConfig(**{**TEXT, "num_labels": VOCABULARY}))


@entry()
class RobertaClasses(Classes):
    pipeline = "net.roberta.encoder.layer"

    def network(self) -> nn.Module:
        from transformers import RobertaConfig, RobertaForSequenceClassification

        return RobertaForSequenceClassification(RobertaConfig(**TEXT, pad_token_id=0))


@entry()
class DistilBertClasses(Classes):
    pipeline = "net.distilbert.transformer.layer"

    def network(self) -> nn.Module:
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        config = DistilBertConfig(
            vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=24,
            max_position_embeddings=16, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
            num_labels=LABELS,
        )  # fmt: skip
        return DistilBertForSequenceClassification(config)


@entry()
class ElectraTokens(Texts):
    pipeline = "net.electra.encoder.layer"

    def network(self) -> nn.Module:
        from transformers import ElectraConfig, ElectraForMaskedLM

        return ElectraForMaskedLM(ElectraConfig(**TEXT, embedding_size=WIDTH))


@entry()
class ViT(Pictures):
    pipeline = "net.vit.layers"

    def network(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig(**IMAGE))


@entry()
class DeiT(Pictures):
    pipeline = "net.deit.layers"

    def network(self) -> nn.Module:
        from transformers import DeiTConfig, DeiTForImageClassification

        return DeiTForImageClassification(DeiTConfig(**IMAGE))


@entry()
class ConvNext(Pictures):
    pipeline = "net.convnext.encoder.stages"

    def network(self) -> nn.Module:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        config = ConvNextConfig(
            image_size=8, patch_size=2, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1],
            num_labels=LABELS,
        )  # fmt: skip
        return ConvNextForImageClassification(config)


@entry()
class OPT(Texts):
    pipeline = "net.model.decoder.layers"

    def network(self) -> nn.Module:
        from transformers import OPTConfig, OPTForCausalLM

        config = OPTConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            ffn_dim=24, max_position_embeddings=16, dropout=0.0, word_embed_proj_dim=WIDTH,
        )  # fmt: skip
        return OPTForCausalLM(config)


@entry()
class Qwen(Texts):
    pipeline = "net.model.layers"

    def network(self) -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=24, max_position_embeddings=16,
        )  # fmt: skip
        return Qwen2ForCausalLM(config)


@entry()
class GPTNeoX(Texts):
    pipeline = "net.gpt_neox.layers"

    def network(self) -> nn.Module:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        config = GPTNeoXConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=16, hidden_dropout=0.0,
            attention_dropout=0.0,
        )  # fmt: skip
        return GPTNeoXForCausalLM(config)
