from __future__ import annotations

from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline.batch_layout import BatchLayout
from lightning_axosparse.pipeline.microbatch import (
    counted,
    fewest_samples,
    samples,
    split,
)
from tests.parity.cases import trainer


@given(size=st.integers(1, 23), wanted=st.integers(1, 30))
def test_parts_are_nearly_equal_and_in_order(size: int, wanted: int) -> None:
    batch = (torch.arange(size), {"y": torch.arange(size * 2).view(size, 2)})
    parts = split(batch, wanted)
    assert samples(batch) == size
    assert len(parts) == min(size, wanted)
    assert max(p.size for p in parts) - min(p.size for p in parts) <= 1
    assert [p.begin for p in parts] == [sum(q.size for q in parts[:n]) for n in range(len(parts))]
    assert torch.equal(torch.cat([p.batch[0] for p in parts]), batch[0])
    assert torch.equal(torch.cat([p.batch[1]["y"] for p in parts]), batch[1]["y"])


def test_a_batch_without_tensors_is_one_microbatch() -> None:
    assert [part.batch for part in split([1, 2], 4)] == [[1, 2]]


def test_samples_of_a_users_parts_are_counted() -> None:
    parts = counted([torch.zeros(3), torch.zeros(1)])
    assert [(part.size, part.begin) for part in parts] == [(3, 0), (1, 3)]


def test_samples_of_a_users_parts_are_counted_along_the_dimension_that_they_divide() -> None:
    sound, labels = torch.zeros(7, 4, 2), torch.zeros(4)
    batch = [sound, labels]
    parts = list(zip(sound.split([3, 1], 1), labels.split([3, 1]), strict=True))
    assert [part.size for part in counted(parts, batch)] == [3, 1]
    images = [torch.zeros(3, 5)] * 5
    assert [part.size for part in counted([images[:2], images[2:]], images)] == [2, 3]


def test_a_layout_says_along_which_dimension() -> None:
    batch = (torch.arange(6).view(2, 3), torch.zeros(2))
    first, second = split(batch, 2, BatchLayout({("[0]",): 1}, (("[1]",),)))
    assert (first.size, second.size) == (1, 2)
    assert torch.equal(second.batch[0], batch[0][:, 1:])
    assert second.batch[1] is batch[1]
    with pytest.raises(ValueError, match=r"batch\[0\]: 3, batch\[1\]: 2"):
        split(batch, 2, BatchLayout({("[0]",): 1, ("[1]",): 0}))


WIDTH = 4


class Seeing(nn.Linear):
    """Notes how many samples it is given at once, batch by batch."""

    seen: ClassVar[dict[tuple[str, int], list[int]]] = {}
    now: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.now.append(len(x))
        return super().forward(x)

    @classmethod
    def begin(cls, loop: str, batch_idx: int) -> None:
        cls.now = cls.seen[loop, batch_idx] = []


class Normed(L.LightningModule):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(Seeing(WIDTH, WIDTH), norm)
        self.trained: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Seeing.begin("train", batch_idx)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        Seeing.begin("validate", batch_idx)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        self.trained.append(len(x))
        return loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("loss", self.layers(x).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(samples: int, batch: int, microbatches: int | None = None, **norm: Any) -> Normed:
    Seeing.seen.clear()
    module = Normed(nn.BatchNorm1d(WIDTH, **norm))
    data = DataLoader(torch.rand(samples, WIDTH), batch)
    strategy = AxoSparseStrategy(2, microbatches, transport="loopback")
    trainer(strategy, max_epochs=1, num_sanity_val_steps=0).fit(module, data, data)
    return module


# Batches 3 and 5 are not compared with their micro-batches, so that layers see these alone.


def test_by_default_each_micro_batch_has_two_samples() -> None:
    fit(samples=29, batch=6)  # 6, 6, 6, 6 and 5
    for loop in ("train", "validate"):
        assert Seeing.seen[loop, 2] == [2, 2, 2]
        assert Seeing.seen[loop, 4] == [2, 3]


def test_norms_without_running_statistics_are_validated_so_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        module = fit(samples=24, batch=8, track_running_stats=False)
        assert Seeing.seen["validate", 2] == [2] * 4
        strategy = AxoSparseStrategy(2, 4, transport="loopback")
        data = DataLoader(torch.rand(8, WIDTH), 8)
        trainer(strategy).validate(module, data, verbose=False)
    said = "'layers.1' (BatchNorm1d) normalizes by the statistics of a micro-batch, and does so in "
    assert caplog.text.count(said) == 2, "in the fit and in the validation"


def test_norms_without_running_statistics_are_no_error_of_the_first_batch() -> None:
    module = fit(samples=8, batch=8, track_running_stats=False)
    assert module.layers[1].running_mean is None
    assert module.trained == [8], "what the step appends is that of the batch"


def test_a_number_that_leaves_one_sample_leaves_the_batch_undivided() -> None:
    with pytest.warns(UserWarning, match="(?s)6 micro-batches.*more than 1 value per channel"):
        fit(samples=8, batch=8, microbatches=6)
    assert Seeing.seen["train", 0][-1] == 8


def test_a_batch_of_one_sample_fails_as_on_one_process() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fit(samples=1, batch=1)


def test_other_networks_take_one_sample() -> None:
    assert fewest_samples(nn.Sequential(nn.LayerNorm(WIDTH), nn.InstanceNorm1d(WIDTH))) == 1
