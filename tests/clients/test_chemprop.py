"""chemprop: property prediction as the notebook `training` of its docs does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_axosparse import AxoSparseStrategy
from tests.clients.same import GRIDS, STEPS, assert_replicas_same, assert_same, pruned, run

pytest.importorskip("chemprop")

from chemprop import data, featurizers, models, nn

SMILES = ["CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCl", "C1CCCCC1", "CC#N", "OCCO"]
BATCH, TOLERANCE = 4, 1e-6


def train(**options: Any) -> models.MPNN:
    points = [
        data.MoleculeDatapoint.from_smi(SMILES[i % 8], torch.randn(1).numpy())
        for i in range(2 * STEPS * BATCH)
    ]
    dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    scaler = dataset.normalize_targets()
    loader = data.build_dataloader(dataset, BATCH, shuffle=False, num_workers=0)
    output = nn.UnscaleTransform.from_standard_scaler(scaler)
    module = models.MPNN(
        nn.BondMessagePassing(d_h=24),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=24, hidden_dim=24, n_layers=2, output_transform=output),
        batch_norm=True,
        metrics=[nn.metrics.RMSE()],
    )
    L.Trainer(**{**options, "precision": "32-true"}).fit(module, loader)  # as its graphs are
    return module


@pytest.mark.parametrize("grid", GRIDS)
def test_it_prunes_as_masked_training(grid: str) -> None:
    assert_same(train, grid, TOLERANCE, microbatches=1)


def test_graphs_are_not_cut_into_micro_batches() -> None:
    with pytest.raises(ValueError, match=r"to cut batch\.bmg\.V .*split_batch=.*microbatches=1"):
        run(train, AxoSparseStrategy(2, transport="loopback"))


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(train, TOLERANCE)


def test_it_saves_and_loads_a_pruned_model(tmp_path: Path) -> None:
    module = pruned(train)
    models.save_model(tmp_path / "model.pt", module)
    loaded = models.load_model(tmp_path / "model.pt")
    torch.testing.assert_close(loaded.state_dict(), dict(module.state_dict()), rtol=0, atol=0)
