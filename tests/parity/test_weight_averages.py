"""Averages of weights on ranks are those of one process: in validation, in files and at the end.

Every stage averages what it keeps, and every rank of a tensor group its parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lightning_axosparse import AxoSparseStrategy, TensorParallel
from lightning_axosparse.checkpoint.consolidate import consolidate
from tests.parity.cases import CLASSES, Net, Record, difference, fit, loaded, trainer
from tests.ranks import run_ranks


class Normed(Net):
    """Running statistics in a layer of each stage and behind the layers."""

    def __init__(self, tied: bool) -> None:
        super().__init__(outer=True, tied=tied)
        for place in (1, 3):
            self.model[place] = nn.Sequential(nn.BatchNorm1d(24), nn.Tanh())
        self.norm = nn.BatchNorm1d(CLASSES)
        for place in (0, 2, 4, 5):
            # Before a BatchNorm its gradient is rounding alone, which Adam would magnify.
            self.model[place].bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


CALLBACKS = {
    "all": lambda: WeightAveraging(),
    "exponential": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=3),
    "stochastic": lambda: StochasticWeightAveraging(1e-2, 2, annealing_epochs=2),
}
STOP = 3
SPLIT = {"model.4": ColwiseParallel(), "model.5": RowwiseParallel()}
GRIDS: dict[str, dict[str, Any]] = {
    "stages": {"g_inter": 2},
    "tensor group": {"tensor_parallel": TensorParallel(2, SPLIT)},
}


def train(
    grid: str, name: str, folder: Path, strategy: Any, ranks: int = 1, resume: bool = False
) -> Record:
    """Train for four epochs, or for the last ones of a checkpoint."""
    L.seed_everything(0, verbose=False)
    saved = ModelCheckpoint(folder, filename=f"{name} {{epoch}}", every_n_epochs=STOP)
    run = trainer(
        strategy,
        ranks,
        max_epochs=4,
        precision="64-true",
        callbacks=[CALLBACKS[name](), saved],
        enable_checkpointing=True,
    )
    path = folder / f"{name} epoch={STOP - 1}.ckpt" if resume else None
    module = Normed(tied=grid == "stages").double()  # Tied weights are not split.
    return fit(run, module, ckpt_path=path, weights_only=False)


def on_ranks(folder: Path) -> dict[tuple[str, str], list[Record]]:
    found = {}
    for grid, options in GRIDS.items():
        for name in CALLBACKS:
            found[grid, name] = [
                train(
                    grid,
                    name,
                    folder / grid,
                    AxoSparseStrategy(
                        microbatches=1,
                        pipeline="model",
                        save_distributed_checkpoint=name == "exponential",
                        **options,
                    ),
                    2,
                    resume,
                )
                for resume in (False, True)
            ]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[tuple[str, str], list[Record]]]:
    return run_ranks(2, on_ranks, folder)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", CALLBACKS)
def test_averages_are_those_of_one_process(
    grid: str, name: str, ranks: list[Any], folder: Path, tmp_path: Path
) -> None:
    expected = [train(grid, name, tmp_path, "auto", resume=resume) for resume in (False, True)]
    for records in ranks:
        for one, other in zip(expected, records[grid, name], strict=True):
            assert difference(one, other) <= 1e-12
    file = f"{name} epoch={STOP - 1}.ckpt"
    saved = folder / grid / file
    ours, theirs = loaded(consolidate(saved) if saved.is_dir() else saved, tmp_path / file)
    assert ours.keys() == theirs.keys()
    averaged = [each["callbacks"].get("StochasticWeightAveraging") for each in (ours, theirs)]
    compared = [(ours[k], theirs[k]) for k in ("state_dict", "current_model_state") if k in ours]
    if averaged[0] is not None:
        compared.append((averaged[0]["average_model_state"], averaged[1]["average_model_state"]))
    assert len(compared) == 2
    for mine, there in compared:
        assert list(mine) == list(there)
        for key, tensor in there.items():
            torch.testing.assert_close(mine[key], tensor, rtol=0, atol=1e-12)
