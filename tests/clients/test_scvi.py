"""scvi-tools: models single cells as the tutorials of its docs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse import AxoSparseStrategy
from tests.clients.same import STEPS, assert_same, pruned, run

pytest.importorskip("scvi")

import anndata
import scvi

BATCH, GENES = 8, 20
PARTS = "z_encoder.encoder", "decoder.px_decoder"
LAYERS = [f"module.{part}.fc_layers.Layer 0" for part in PARTS]


def train(**options: Any) -> Any:
    scvi.settings.seed = 0
    random = np.random.default_rng(0)
    counts = random.poisson(3.0, (2 * STEPS * BATCH, GENES)).astype(np.float32)
    cells = anndata.AnnData(counts, {"batch": random.choice(["a", "b"], len(counts))})
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0)
    model.train(train_size=1.0, batch_size=BATCH, max_epochs=2, **options)
    return model


@pytest.mark.parametrize("grid", ["one rank", "loopback"])
def test_it_prunes_as_masked_training(grid: str) -> None:
    assert_same(train, grid, microbatches=1, pipeline=LAYERS)


def test_batches_that_it_shuffles_by_rank_are_refused() -> None:
    strategy = AxoSparseStrategy(2, 1, LAYERS)
    with pytest.raises(MisconfigurationException, match="were given different ones"):
        run(train, strategy, devices=2)


def test_containers_without_an_order_are_named() -> None:
    with pytest.raises(MisconfigurationException, match="Several containers could be pipelined"):
        run(train, AxoSparseStrategy(2, transport="loopback"))


def test_it_saves_and_loads_a_pruned_model(tmp_path: Path) -> None:
    model = pruned(train)
    model.save(str(tmp_path / "model"))
    loaded = scvi.model.SCVI.load(str(tmp_path / "model"), model.adata, accelerator="cpu")
    latent = model.get_latent_representation()
    np.testing.assert_allclose(loaded.get_latent_representation(), latent, rtol=1e-6, atol=1e-6)
