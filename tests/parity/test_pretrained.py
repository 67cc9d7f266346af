"""Networks that ``from_pretrained`` loads of a folder of shards: each rank reads its own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_axosparse import AxoSparseStrategy
from tests.memory import touched
from tests.parity.cases import difference, recorded, trainer
from tests.ranks import run_ranks

VOCABULARY, LAYERS, WIDTH, LENGTH = 64, 6, 256, 16
CONTAINERS = {"gpt2": "network.transformer.h", "llama": "network.model.layers"}


class Pretrained(L.LightningModule):
    """A causal language model whose weights are loaded in ``configure_model``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.network = folder, None

    def configure_model(self) -> None:
        mapped: list[Any] = []  # kept, so that the system tells what was read of any of them

        original = torch.UntypedStorage.from_file

        def from_file(*args: Any, **kwargs: Any) -> Any:
            mapped.append(original(*args, **kwargs))
            return mapped[-1]

        if self.network is None:
            with patch.object(torch.UntypedStorage, "from_file", from_file):
                self.network = AutoModelForCausalLM.from_pretrained(self.folder)
            self.mapped = mapped
            self.before = touched(self.is_file)

    def is_file(self, line: str) -> bool:
        return line.endswith(".safetensors") and str(self.folder) in line

    def on_train_end(self) -> None:
        self.after = touched(self.is_file)
        self.kept = sum(p.nbytes for p in self.parameters() if not p.is_meta)
        del self.mapped

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> Any:
        # AdamW makes steps of gradients that are nothing but rounding.
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(architecture: str, folder: Path, g_inter: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (16, LENGTH), generator=generator)
    strategy: Any = "auto"
    if g_inter > 1:
        strategy = AxoSparseStrategy(g_inter, 4, pipeline=CONTAINERS[architecture])
    run = trainer(strategy, g_inter, max_steps=4, max_epochs=2)
    L.seed_everything(0, verbose=False)
    module = Pretrained(folder / architecture)
    run.fit(module, DataLoader(ids, 8))
    return {
        "record": recorded(run, module),
        "kept": module.kept,
        "before": module.before,
        "after": module.after,
    }


def on_ranks(folder: Path, g_inter: int) -> dict[str, Any]:
    return {name: train(name, folder, g_inter) for name in CONTAINERS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder of shards for each architecture."""
    path = tmp_path_factory.mktemp("pretrained")
    for architecture in CONTAINERS:
        config = AutoConfig.for_model(
            architecture,
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(path / architecture, max_shard_size="4MB")
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(3, on_ranks, folder, 3)


@pytest.mark.parametrize("architecture", CONTAINERS)
def test_ranks_train_what_was_loaded_as_one_process_does(
    architecture: str, folder: Path, ranks: list[dict[str, Any]]
) -> None:
    alone = train(architecture, folder, 1)
    for rank in ranks:
        assert difference(rank[architecture]["record"], alone["record"]) <= 1e-5


@pytest.mark.parametrize("architecture", CONTAINERS)
def test_a_rank_reads_the_weights_of_its_layers(
    architecture: str, folder: Path, ranks: list[dict[str, Any]]
) -> None:
    files = [*(folder / architecture).glob("*.safetensors")]
    whole = sum(file.stat().st_size for file in files)
    assert len(files) > 5
    a_layer = whole / LAYERS
    for rank in ranks:
        kept, before, after = (rank[architecture][key] for key in ("kept", "before", "after"))
        assert kept < whole / 2
        # The library touches the first bytes of every tensor, and the system maps pages around.
        assert kept <= after
        assert after - before <= kept + a_layer
        assert after < whole - a_layer
