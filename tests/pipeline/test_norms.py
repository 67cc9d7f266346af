"""BatchNorms get micro-batches of which they can make statistics, or the error says what to do."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline.norms import fewest_samples
from tests.parity.cases import trainer

WIDTH = 4


class Normed(L.LightningModule):
    """Notes how many samples its last stage sees at once."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)
        self.trained: list[int] = []
        self.validated: list[int] = []

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        self.trained.append(len(x))
        return loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.layers(x)
        self.validated.append(len(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    samples: int,
    batch: int,
    microbatches: int | None = None,
    check_first_batch: bool = False,
    **norm: Any,
) -> Normed:
    module = Normed(nn.BatchNorm1d(WIDTH, **norm))
    data = DataLoader(torch.rand(samples, WIDTH), batch)
    strategy = AxoSparseStrategy(
        2, microbatches, transport="loopback", check_first_batch=check_first_batch
    )
    trainer(strategy, max_epochs=1, num_sanity_val_steps=0).fit(module, data, data)
    return module


def test_by_default_each_micro_batch_has_two_samples() -> None:
    module = fit(samples=17, batch=6)  # 6, 6 and 5
    assert module.trained == [2, 2, 2] * 2 + [2, 3]
    assert module.validated == [2, 2, 2] * 2 + [5]


def test_norms_without_running_statistics_are_validated_so_too() -> None:
    assert fit(samples=8, batch=8, track_running_stats=False).validated == [2] * 4


def test_norms_without_running_statistics_are_no_error_of_the_first_batch() -> None:
    module = fit(samples=8, batch=8, check_first_batch=True, track_running_stats=False)
    assert module.layers[1].running_mean is None
    assert module.trained == [8], "what the step appends is that of the batch"


def test_a_number_that_leaves_one_sample_is_explained() -> None:
    words = r"8 samples are divided into 6 .*microbatches=\.\.\.\) at most 4, or .* 12 samples"
    with pytest.raises(MisconfigurationException, match=words) as raised:
        fit(samples=8, batch=8, microbatches=6)
    assert "Expected more than 1 value per channel" in str(raised.value.__cause__)


def test_a_batch_of_one_sample_fails_as_on_one_process() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fit(samples=1, batch=1)


def test_other_networks_take_one_sample() -> None:
    assert fewest_samples(nn.Sequential(nn.LayerNorm(WIDTH), nn.InstanceNorm1d(WIDTH))) == 1
