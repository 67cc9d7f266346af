"""Networks of `transformers`, as they come, train in a pipeline as they do on one process.

Their blocks stand in an ``nn.ModuleList`` and are called with masks, keyword arguments, position
biases and caches, which have to cross the edges of the stages, or be made anew on each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_axosparse import AxoSparseStrategy
from tests.parity import networks
from tests.parity.cases import Record, difference, recorded, trainer
from tests.parity.networks import VOCABULARY
from tests.ranks import run_ranks

STEPS, LAYERS = 3, 4


class Texts(Dataset):
    """Token ids with padding behind each text, as tokenizers return them."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, VOCABULARY, (samples, 12), generator=generator)
        lengths = torch.randint(5, 13, (samples, 1), generator=generator)
        self.mask = (torch.arange(12) < lengths).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index]}


class Language(L.LightningModule):
    """Any of the networks, with a loss that is a mean over samples, however much is padding."""

    def __init__(self, network: nn.Module, shift: int) -> None:
        super().__init__()
        self.network, self.shift = network, shift

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        inputs = {"labels": ids} if self.network.config.is_encoder_decoder else {}
        logits = self.network(**batch, **inputs).logits
        width = ids.shape[1] - self.shift
        logits, targets, real = logits[:, :width], ids[:, self.shift :], mask[:, self.shift :]
        losses = nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        loss = ((losses * real).sum(1) / real.sum(1)).mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def gpt2(use_cache: bool) -> Language:
    network = networks.gpt2(LAYERS)
    network.config.use_cache = use_cache
    return Language(network, shift=1)


NETWORKS: dict[str, Callable[[], Language]] = {
    "GPT-2": lambda: gpt2(use_cache=True),
    "GPT-2 without cache": lambda: gpt2(use_cache=False),
    "BERT": lambda: Language(networks.bert(LAYERS), shift=0),
    # A pipelined decoder sends one gradient a stage into the encoder.
    "T5": lambda: Language(networks.t5(LAYERS), shift=0),
}
# Row: network, strategy.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT-2", {"pipeline": "network.transformer.h"}),
    "GPT-2 recomputed": (
        "GPT-2 without cache",
        {"pipeline": "network.transformer.h", "recompute": 2},
    ),
    "BERT": ("BERT", {"pipeline": "network.bert.encoder.layer"}),
    "T5 encoder": ("T5", {"pipeline": "network.encoder.block"}),
    "T5 decoder": ("T5", {"pipeline": "network.decoder.block"}),
}


def train(network: str, strategy: Any, ranks: int = 1) -> Record:
    L.seed_everything(0, verbose=False)
    module = NETWORKS[network]()
    run = trainer(strategy, ranks, precision="64-true", max_epochs=1)
    run.fit(module, DataLoader(Texts(6 * STEPS), batch_size=6))
    return recorded(run, module)


def train_rows(ranks: int) -> dict[str, Record]:
    return {
        row: train(network, AxoSparseStrategy(g_inter=ranks, microbatches=4, **options), ranks)
        for row, (network, options) in ROWS.items()
    }


@pytest.fixture(scope="module")
def runs() -> Callable[[int], list[dict[str, Record]]]:
    """The records of every row on every one of so many ranks."""
    return cache(lambda ranks: run_ranks(ranks, train_rows, ranks))


@pytest.fixture(scope="module")
def expected() -> dict[str, Record]:
    """What one process does with each network."""
    return {network: train(network, "auto") for network in NETWORKS}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_network_of_transformers_trains_as_on_one_process(
    row: str, ranks: int, runs: Any, expected: dict[str, Record]
) -> None:
    network, _ = ROWS[row]
    assert len(expected[network].losses) == STEPS
    for records in runs(ranks):
        assert difference(expected[network], records[row]) <= 1e-12


def test_a_cache_that_recomputing_would_fill_twice_is_refused() -> None:
    strategy = AxoSparseStrategy(
        g_inter=2, transport="loopback", pipeline="network.transformer.h", recompute=1
    )
    with pytest.raises(RuntimeError, match=r"'network\.transformer\.h\.\d'.*use_cache=False"):
        train("GPT-2", strategy)
