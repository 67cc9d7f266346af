"""darts: forecasts as the user guide of its torch models makes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse import AxoSparseStrategy
from tests.clients.same import STEPS, assert_replicas_same, assert_same, pruned, run

pytest.importorskip("darts")

from darts import TimeSeries, models

BATCH, WIDTHS = 8, {"num_stacks": 2, "num_layers": 2, "layer_widths": 16}
NETWORKS = {
    "N-BEATS": partial(models.NBEATSModel, num_blocks=1, **WIDTHS),
    "N-HiTS": partial(models.NHiTSModel, dropout=0.0, **WIDTHS),
    "TCN": partial(models.TCNModel, num_filters=4, weight_norm=True, dropout=0.0),
    "TFT": partial(models.TFTModel, hidden_size=8, dropout=0.0, add_relative_index=True),
    "TiDE": partial(models.TiDEModel, hidden_size=16, dropout=0.0),
    "Transformer": partial(models.TransformerModel, d_model=8, dim_feedforward=16, dropout=0.0),
    "TSMixer": partial(models.TSMixerModel, hidden_size=8, ff_size=8, dropout=0.0),
}
NOISE = {"TFT": 1e-10, "Transformer": 1e-10}
"""Attention's biases of keys have gradients of rounding alone, of which Adam makes steps."""

SERIES = TimeSeries.from_values(np.random.default_rng(0).normal(size=200).cumsum())


def train(network: Any, **options: Any) -> Any:
    model = network(
        12, 4, batch_size=BATCH, n_epochs=STEPS, random_state=0, pl_trainer_kwargs=options
    )
    return model.fit(SERIES, verbose=False)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("grid", ["one rank", "loopback"])
def test_it_prunes_as_masked_training(name: str, grid: str) -> None:
    assert_same(partial(train, NETWORKS[name]), grid, NOISE.get(name, 1e-12))


def test_stages_on_ranks() -> None:
    assert_same(partial(train, NETWORKS["N-BEATS"]), "two stages")


def test_an_lstm_has_no_layers_for_stages() -> None:
    network = partial(models.BlockRNNModel, model="LSTM", hidden_dim=8, n_rnn_layers=2, dropout=0.0)
    assert_same(partial(train, network), "one rank")
    with pytest.raises(MisconfigurationException, match=r"pipeline=\['rnn', 'fc'\]"):
        run(partial(train, network), AxoSparseStrategy(2, transport="loopback"))


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(partial(train, NETWORKS["N-BEATS"]))


def test_it_saves_and_loads_a_pruned_model(tmp_path: Path) -> None:
    model = pruned(partial(train, NETWORKS["N-BEATS"]))
    model.save(str(tmp_path / "model.pt"))
    loaded = models.NBEATSModel.load(str(tmp_path / "model.pt"), weights_only=False)
    forecast = model.predict(4, SERIES).values()
    np.testing.assert_allclose(loaded.predict(4, SERIES).values(), forecast, rtol=1e-12)
