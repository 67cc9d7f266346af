"""neuralforecast: forecasts as the quickstart of its docs makes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_axosparse import AxoSparseStrategy
from tests.clients.same import assert_replicas_same, assert_same, pruned, run

pytest.importorskip("neuralforecast")

import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, MLP, NBEATS, NHITS, TFT

SERIES, LENGTH = 16, 60
NETWORKS = {
    "LSTM": partial(LSTM, encoder_hidden_size=8, decoder_hidden_size=8),
    "MLP": partial(MLP, hidden_size=16),
    "N-BEATS": partial(NBEATS, mlp_units=[[16, 16]] * 3, dropout_prob_theta=0.0),
    "N-HiTS": partial(NHITS, mlp_units=[[16, 16]] * 3),
    "TFT": partial(TFT, hidden_size=8, n_head=2, dropout=0.0, attn_dropout=0.0),
}


def train(name: str, **options: Any) -> Any:
    rows = pd.DataFrame(
        {
            "unique_id": np.repeat(np.arange(SERIES), LENGTH),
            "ds": np.tile(np.arange(LENGTH), SERIES),
            "y": np.random.default_rng(0).normal(size=(SERIES, LENGTH)).cumsum(1).ravel(),
        }
    )
    network = NETWORKS[name](
        h=4, input_size=12, batch_size=8, windows_batch_size=16, random_seed=1, **options
    )
    forecast = NeuralForecast([network], freq=1)
    forecast.fit(rows)
    return forecast


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("grid", ["one rank", "loopback"])
def test_it_prunes_as_masked_training(name: str, grid: str) -> None:
    assert_same(partial(train, name), grid, microbatches=1)


def test_windows_that_a_step_draws_of_the_batch_leave_it_undivided() -> None:
    with pytest.warns(UserWarning, match="stages wait for"):
        run(partial(train, "N-HiTS"), AxoSparseStrategy(2, transport="loopback"))


def test_stages_on_ranks() -> None:
    assert_same(partial(train, "N-HiTS"), "two stages", microbatches=1)


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(partial(train, "N-HiTS"))


def test_it_saves_and_loads_a_pruned_model(tmp_path: Path) -> None:
    forecast = pruned(partial(train, "N-HiTS"))
    forecast.save(str(tmp_path), save_dataset=True)
    loaded = NeuralForecast.load(str(tmp_path))
    pd.testing.assert_frame_equal(loaded.predict(), forecast.predict())
