"""Averages of weights on ranks are those of one process: in validation, in files and at the end.

Every stage averages what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.checkpoint.consolidate import consolidate
from tests.parity.cases import CLASSES, Net, Record, difference, fit, trainer
from tests.ranks import run_ranks


class Normed(Net):
    """Running statistics in a layer of each stage and behind the layers."""

    def __init__(self) -> None:
        super().__init__(outer=True, tied=True)
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


def train(name: str, folder: Path, strategy: Any, ranks: int = 1, resume: bool = False) -> Record:
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
    return fit(run, Normed().double(), ckpt_path=path, weights_only=False)


def both(name: str, folder: Path, strategy: Callable[[], Any], ranks: int = 1) -> list[Record]:
    return [train(name, folder, strategy(), ranks, resume) for resume in (False, True)]


def on_ranks(folder: Path) -> dict[str, list[Record]]:
    def strategy(name: str) -> AxoSparseStrategy:
        is_folder = name == "exponential"
        return AxoSparseStrategy(
            2, microbatches=1, pipeline="model", save_distributed_checkpoint=is_folder
        )

    return {name: both(name, folder, partial(strategy, name), 2) for name in CALLBACKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, list[Record]]]:
    return run_ranks(2, on_ranks, folder)


@pytest.mark.parametrize("name", CALLBACKS)
def test_averages_are_those_of_one_process(
    name: str, ranks: list[Any], folder: Path, tmp_path: Path
) -> None:
    expected = both(name, tmp_path, lambda: "auto")
    for records in ranks:
        for one, other in zip(expected, records[name], strict=True):
            assert difference(one, other) <= 1e-12
    file = f"{name} epoch={STOP - 1}.ckpt"
    ours = folder / file
    ours, theirs = (
        torch.load(path, weights_only=False)
        for path in (consolidate(ours) if ours.is_dir() else ours, tmp_path / file)
    )
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
