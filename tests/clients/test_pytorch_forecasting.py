"""pytorch-forecasting: forecasts as the tutorials of its docs make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from tests.clients.same import assert_replicas_same, assert_same, pruned

pytest.importorskip("pytorch_forecasting")

import pandas as pd
from pytorch_forecasting import NBeats, NHiTS, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import SMAPE, QuantileLoss

BATCH, SERIES, LENGTH = 8, 8, 30


def dataset(covariates: bool) -> Any:
    values = np.random.default_rng(0).normal(size=(SERIES, LENGTH)).cumsum(1)
    rows = pd.DataFrame(
        {
            "series": np.repeat(np.arange(SERIES).astype(str), LENGTH),
            "time_idx": np.tile(np.arange(LENGTH), SERIES),
            "value": values.ravel() + 50,
        }
    )
    known = {
        "static_categoricals": ["series"],
        "time_varying_known_reals": ["time_idx"],
        "target_normalizer": GroupNormalizer(groups=["series"], transformation="softplus"),
        "add_relative_time_idx": True,
        "add_target_scales": True,
    }
    return TimeSeriesDataSet(
        rows,
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=10,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **(known if covariates else {}),
    )


TFT = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4}
NETWORKS: dict[str, Callable[..., Any]] = {
    "TFT": lambda data, **more: TemporalFusionTransformer.from_dataset(
        data, loss=QuantileLoss(), **TFT, **more
    ),
    "N-BEATS": partial(NBeats.from_dataset, widths=[16, 16], backcast_loss_ratio=0.1),
    "N-HiTS": lambda data, **more: NHiTS.from_dataset(data, hidden_size=16, loss=SMAPE(), **more),
}
"""Losses are made anew as they keep values."""


def train(name: str, **options: Any) -> Any:
    training = dataset(name == "TFT")
    module = NETWORKS[name](training, learning_rate=0.03, dropout=0.0, optimizer="adam")
    loader = training.to_dataloader(train=True, batch_size=BATCH, num_workers=0)
    run = L.Trainer(gradient_clip_val=0.1, **options)
    run.fit(module, loader)
    return run, module


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("grid", ["one rank", "loopback"])
def test_it_prunes_as_masked_training(name: str, grid: str) -> None:
    assert_same(partial(train, name), grid)


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(partial(train, "N-BEATS"))


def test_it_loads_the_checkpoint_of_a_pruned_model(tmp_path: Path) -> None:
    trainer, module = pruned(partial(train, "TFT"))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = TemporalFusionTransformer.load_from_checkpoint(tmp_path / "model.ckpt")
    torch.testing.assert_close(loaded.state_dict(), dict(module.state_dict()), rtol=0, atol=0)
