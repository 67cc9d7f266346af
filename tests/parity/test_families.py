"""Networks of public libraries, as these ship them and with their own losses, train in a pipeline
as they do on one process, before and after a ticket was drawn.

All in float64, also where the libraries round to float32 in between: sums of rounded parts differ.
The others are in ``test_containers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.parity import networks
from tests.parity.cases import Record, difference, trained
from tests.parity.networks import VOCABULARY, WIDTH
from tests.parity.rows import rows_with_ticket

LENGTH, LAYERS, CLASSES = 8, 3, 5
BATCH, STEPS = 4, 5


class Texts(Dataset):
    """Token ids with padding, as tokenizers return them, and labels as collators make them."""

    def __init__(self, masked: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)
        lengths = torch.randint(4, LENGTH + 1, (len(self.ids), 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        hidden = torch.rand(self.ids.shape, generator=generator) < 0.4
        counts = self.mask.bool() & hidden if masked else self.mask.bool()
        self.labels = self.ids.where(counts, -100)
        if masked:
            self.ids = self.ids.where(~hidden, 0)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


class Images(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.pixels = torch.randn(STEPS * BATCH, 3, 8, 8, generator=generator).double()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels[index], "labels": torch.tensor(index % CLASSES)}


class Family(L.LightningModule):
    """A network whose loss is its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(**batch).loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Translator(Family):
    """``nn.Transformer``, with its masks."""

    def __init__(self) -> None:
        network = nn.Transformer(WIDTH, 2, 2, 2, 24, dropout=0.0, batch_first=True)
        super().__init__(network)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        source, labels = self.embed(batch["input_ids"]), batch["labels"]
        target = self.embed(batch["input_ids"].roll(1, 1))
        padding = batch["attention_mask"] == 0
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=target.dtype)
        states = self.net(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return nn.functional.cross_entropy(self.head(states).mT, labels)


class Recurrent(Family):
    """A stack of LSTMs, with the states of the first one as those in which the others begin."""

    def __init__(self) -> None:
        stack = [nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(LAYERS)]
        super().__init__(nn.ModuleDict({"layers": nn.ModuleList(stack)}))
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, state = self.embed(batch["input_ids"]), None
        for layer in self.net["layers"]:
            x, last = layer(x, state)
            state = state or last
        return nn.functional.cross_entropy(self.head(x)[:, :-1].mT, batch["labels"][:, 1:])


def vit() -> Family:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Family(ViTForImageClassification(config))


def uncached(network: nn.Module) -> Family:
    network.config.use_cache = False
    return Family(network)


def lora() -> Family:
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    return Family(get_peft_model(networks.llama(LAYERS), config))


# Row: network, data, options of the strategy.
ROWS: dict[str, tuple[Callable[[], Family], Callable[[], Dataset], dict[str, Any]]] = {
    "GPT-2": (lambda: Family(networks.gpt2(LAYERS)), Texts, {"pipeline": "net.transformer.h"}),
    "GPT-2 recomputed": (
        lambda: uncached(networks.gpt2(LAYERS)),
        Texts,
        {"pipeline": "net.transformer.h", "recompute": 2},
    ),
    "Llama": (lambda: Family(networks.llama(LAYERS)), Texts, {"pipeline": "net.model.layers"}),
    # The loss that balances experts is no mean over samples.
    "Mixtral": (
        lambda: Family(networks.mixtral(LAYERS)),
        Texts,
        {"pipeline": "net.model.layers", "microbatches": 1},
    ),
    "BERT": (
        lambda: Family(networks.bert(LAYERS)),
        lambda: Texts(masked=True),
        {"pipeline": "net.bert.encoder.layer"},
    ),
    "T5": (
        lambda: Family(networks.t5(2)),
        Texts,
        {"pipeline": ["net.encoder.block", "net.decoder.block"]},
    ),
    "T5 encoder": (lambda: Family(networks.t5(3)), Texts, {"pipeline": "net.encoder.block"}),
    # It sends one gradient a stage into the encoder.
    "T5 decoder": (lambda: Family(networks.t5(3)), Texts, {"pipeline": "net.decoder.block"}),
    "ViT": (vit, Images, {"pipeline": "net.vit.layers"}),
    "Transformer": (Translator, Texts, {"pipeline": ["net.encoder.layers", "net.decoder.layers"]}),
    "LSTM": (Recurrent, Texts, {"pipeline": "net.layers"}),
    "LoRA": (lora, Texts, {"pipeline": "net.base_model.model.model.layers"}),
}

# What the ticket prunes, where not all weights: of LoRA the frozen ones.
PRUNED = {"LoRA": {"*.lora_*": False}}


OPTIONS = {row: {"microbatches": 2, **own} for row, (_, _, own) in ROWS.items()}


def train(row: str, strategy: Any, ranks: int = 1, ticket: bool = False) -> Record:
    make, data, _ = ROWS[row]
    early_bird = EarlyBirdTicket(0.5, every=1, draw_by=2, which=PRUNED.get(row))
    with mock.patch.object(Tensor, "float", Tensor.double):
        return trained(
            make,
            strategy,
            ranks,
            DataLoader(data(), BATCH),
            DataLoader(data(), BATCH),
            max_epochs=1,
            limit_val_batches=1,
            callbacks=[early_bird] if ticket else [],
        )


@pytest.fixture(scope="module", params=["ticket on ranks", "one process"])
def runs(request: pytest.FixtureRequest) -> tuple[dict[str, Record], list[dict[str, Record]]]:
    """The records of every network; a ticket is drawn after two of five steps."""
    return rows_with_ticket("ranks" in request.param, train, OPTIONS)


@pytest.mark.parametrize("row", ROWS)
def test_a_network_trains_as_on_one_process(row: str, runs: Any) -> None:
    expected, ranks = runs
    assert len(expected[row].losses) == STEPS
    for records in ranks:
        assert difference(expected[row], records[row]) <= 1e-12


def test_a_cache_that_recomputing_would_fill_twice_is_refused() -> None:
    strategy = AxoSparseStrategy(
        g_inter=2, transport="loopback", pipeline="net.transformer.h", recompute=1
    )
    with pytest.raises(RuntimeError, match=r"'net\.transformer\.h\.\d'.*use_cache=False"):
        train("GPT-2", strategy)
