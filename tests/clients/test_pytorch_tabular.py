"""pytorch-tabular: tables as the tutorials of its docs learn them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest

from tests.clients.same import STEPS, assert_replicas_same, assert_same, pruning
from tests.ranks import REPOSITORY

pytest.importorskip("pytorch_tabular")

import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig, GANDALFConfig

BATCH = 8
ATTENTION = {"attn_dropout": 0.0, "ff_dropout": 0.0, "add_norm_dropout": 0.0, "num_heads": 2}
NETWORKS = {
    "MLP": partial(CategoryEmbeddingModelConfig, layers="16-16", dropout=0.0),
    "FT-Transformer": partial(
        FTTransformerConfig, input_embed_dim=8, num_attn_blocks=2, **ATTENTION
    ),
    "GANDALF": partial(GANDALFConfig, gflu_stages=2),
}
TRAINER = {"max_epochs": 1, "accelerator": "cpu", "progress_bar": "none", "load_best": False}
TRAINER |= {"checkpoints": None, "early_stopping": None, "batch_size": BATCH}


def table(seed: int) -> Any:
    random, rows = np.random.default_rng(seed), 2 * STEPS * BATCH
    numbers = random.normal(size=(rows, 4))
    kinds, target = random.choice(["x", "y", "z"], rows), (numbers[:, 0] > 0).astype(int)
    return pd.DataFrame(numbers, columns=list("abcd")).assign(kind=kinds, target=target)


def tabular(name: str) -> TabularModel:
    return TabularModel(
        None,
        DataConfig(["target"], continuous_cols=list("abcd"), categorical_cols=["kind"]),
        NETWORKS[name](task="classification", learning_rate=1e-2),
        OptimizerConfig(),
        TrainerConfig(trainer_kwargs={"strategy": "axosparse"}, **TRAINER),
        verbose=False,
    )


def train(name: str, **options: Any) -> None:
    model = tabular(name)
    data = model.prepare_dataloader(train=table(1), validation=table(2), seed=1)
    loaders = data.train_dataloader(), data.val_dataloader()
    L.Trainer(**options).fit(model.prepare_model(data), *loaders)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes files into the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("grid", ["one rank", "loopback"])
def test_it_prunes_as_masked_training(name: str, grid: str) -> None:
    more = {"microbatches": 1} if name == "GANDALF" else {}  # a norm whose output layers read
    assert_same(partial(train, name), grid, **more)


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(partial(train, "MLP"))
    shutil.rmtree(REPOSITORY / ".pt_tmp")  # What it writes into the folder of the ranks.


def test_it_saves_and_loads_a_model_pruned_by_its_own_trainer(tmp_path: Path) -> None:
    model, rows = tabular("FT-Transformer"), table(1)
    draw = pruning()
    model.fit(train=rows, validation=table(2), callbacks=[draw], seed=1)
    assert draw.ticket is not None
    model.save_model(str(tmp_path / "model"))
    loaded = TabularModel.load_model(str(tmp_path / "model"))
    pd.testing.assert_frame_equal(loaded.predict(rows), model.predict(rows), atol=1e-6)
