from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline.batch_layout import BatchLayout
from lightning_axosparse.pipeline.loss.outputs import merge
from lightning_axosparse.pipeline.microbatch import (
    BatchFingerprint,
    MicroBatch,
    even_parts,
    fewest_samples,
    fingerprint,
    of_replica,
    samples,
    split,
    weigh,
    weigh_by,
)
from tests.parity.cases import trainer


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    name: str


@given(size=st.integers(1, 23), wanted=st.integers(1, 30))
def test_parts_are_nearly_equal_in_order_and_weigh_one(size: int, wanted: int) -> None:
    batch = (torch.arange(size), {"y": torch.arange(size * 2).view(size, 2)})
    parts = split(batch, wanted)
    assert len(parts) == min(size, wanted)
    assert max(p.size for p in parts) - min(p.size for p in parts) <= 1
    assert sum(p.weight for p in parts) == pytest.approx(1)
    assert torch.equal(torch.cat([p.batch[0] for p in parts]), batch[0])
    assert torch.equal(torch.cat([p.batch[1]["y"] for p in parts]), batch[1]["y"])
    assert torch.equal(merge([p.batch for p in parts], parts)[0], batch[0])


def test_named_tuples_dataclasses_strings_and_scalars() -> None:
    batch = {
        "pair": Pair(torch.zeros(4, 1), torch.ones(4)),
        "names": ["a", "b", "c", "d"],
        "sample": Sample(torch.ones(4), "all"),
        "rate": torch.tensor(0.5),
        "none": None,
    }
    first, second = (part.batch for part in split(batch, 2))
    assert isinstance(first["pair"], Pair)
    assert second["pair"].x.shape == (2, 1)
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert (type(second["sample"]), second["sample"].name) == (Sample, "all")
    assert second["sample"].x.shape == (2,)
    assert first["rate"] is batch["rate"]
    assert first["none"] is None
    assert samples(batch) == 4


def test_tensors_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch\[1\] of shape \(3, 3\).*split_batch"):
        split((torch.zeros(4), torch.zeros(3, 3)), 2)


def test_a_batch_without_tensors_is_one_microbatch() -> None:
    assert [part.batch for part in split([1, 2], 4)] == [[1, 2]]


def test_parts_of_a_user_are_weighed_by_their_samples() -> None:
    parts = weigh([torch.zeros(3), torch.zeros(1)])
    assert [(part.size, part.weight) for part in parts] == [(3, 0.75), (1, 0.25)]


def test_parts_of_a_user_are_weighed_along_the_dimension_that_they_divide() -> None:
    sound, labels = torch.zeros(7, 4, 2), torch.zeros(4)
    batch = [sound, labels]
    parts = list(zip(sound.split([3, 1], 1), labels.split([3, 1]), strict=True))
    assert [part.size for part in weigh(parts, batch)] == [3, 1]
    images = [torch.zeros(3, 5)] * 5
    assert [part.size for part in weigh([images[:2], images[2:]], images)] == [2, 3]


def test_a_layout_says_along_which_dimension() -> None:
    batch = (torch.arange(6).view(2, 3), torch.zeros(2))
    first, second = split(batch, 2, BatchLayout({("[0]",): 1}, (("[1]",),)))
    assert (first.size, second.size) == (1, 2)
    assert torch.equal(second.batch[0], batch[0][:, 1:])
    assert second.batch[1] is batch[1]
    with pytest.raises(ValueError, match=r"batch\[0\]: 3, batch\[1\]: 2.*split_batch"):
        split(batch, 2, BatchLayout({("[0]",): 1, ("[1]",): 0}))


@pytest.mark.parametrize(
    ("samples", "wanted", "replicas_per_batch", "parts"),
    [(10, 4, 1, 5), (7, 4, 1, 7), (8, 4, 1, 4), (997, 8, 1, 1), (9, 4, 2, 3), (12, 4, 3, 3)],
)
def test_even_parts(samples: int, wanted: int, replicas_per_batch: int, parts: int) -> None:
    assert even_parts(samples, wanted, replicas_per_batch) == parts


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_even_parts_divide_the_batch(samples: int, wanted: int, replicas_per_batch: int) -> None:
    parts = even_parts(samples, wanted, replicas_per_batch)
    assert samples % parts == 0
    assert samples % replicas_per_batch or parts % replicas_per_batch == 0
    assert samples % wanted or wanted % replicas_per_batch or parts == wanted


@given(st.integers(0, 9), st.integers(1, 5))
def test_replicas_divide_the_micro_batches_evenly(count: int, shares: int) -> None:
    parts = [MicroBatch(None, 1, 1 / 9, number) for number in range(count)]
    each = [of_replica(parts, index, shares) for index in range(shares)]
    assert [part.number for own in each for part in own] == list(range(count))
    assert max(map(len, each)) - min(map(len, each)) <= 1


PARTS = [MicroBatch(None, 3, 0.75), MicroBatch(None, 1, 0.25, 1)]
LABELS = torch.tensor([[1, -100], [0, 3]])


@pytest.mark.parametrize(
    ("rule", "batches", "expected"),
    [
        ("y", [{"y": LABELS}, {"y": LABELS[:1]}], [0.75, 0.25]),
        ("y", [{"y": LABELS > 0}, {"y": LABELS == 3}], [2 / 3, 1 / 3]),
        ("y", [{"y": torch.tensor([0.5])}, {"y": torch.tensor([1.5])}], [0.25, 0.75]),
        ("y", [SimpleNamespace(y=LABELS), SimpleNamespace(y=LABELS)], [0.5, 0.5]),
        ("y", [{"y": LABELS[:0]}, {"y": LABELS[:0]}], [0.75, 0.25]),
        (lambda batch: (batch >= 0).sum(), [LABELS, LABELS[:1]], [0.75, 0.25]),
    ],
)
def test_rules_of_users(rule: Any, batches: list[Any], expected: list[float]) -> None:
    given = [part._replace(batch=b) for part, b in zip(PARTS, batches, strict=True)]
    assert [part.weight for part in weigh_by(rule, given)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("labels", r"names no entry of the batch \(\['y'\]\)"),
        (lambda batch: -1, "gave -1"),
        (lambda batch: None, "gave None"),
        (lambda batch: float("nan"), "gave nan"),
        (lambda batch: torch.ones(2), "gave tensor"),
    ],
)
def test_rules_that_give_no_weight_are_refused(rule: Any, words: str) -> None:
    given = [part._replace(batch={"y": LABELS}) for part in PARTS]
    with pytest.raises(MisconfigurationException, match=words):
        weigh_by(rule, given)


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=6), st.integers(0, 5))
def test_fingerprint_sees_every_value(values: list[float], position: int) -> None:
    tensor = torch.tensor(values)
    other = tensor.clone()
    other[position % len(values)] += 1.0
    nested = {"x": [tensor, "a"], "y": 1}
    assert fingerprint(nested) == fingerprint({"x": [tensor.clone(), "a"], "y": 1})
    if not torch.equal(tensor, other):
        assert fingerprint(nested) != fingerprint({"x": [other, "a"], "y": 1})


def test_fingerprint_sees_types_shapes_and_order() -> None:
    x = torch.arange(6.0)
    variants = [x, x.double(), x.bfloat16(), x.view(2, 3), x.view(2, 3).T, x.flip(0), x > 2]
    variants += [x.to(torch.complex64), [x], x.numpy(), ["a", "b"], ["b", "a"], [1], [1.0], []]
    prints = [fingerprint(variant) for variant in variants]
    assert fingerprint([x]) == fingerprint(x)
    assert len(set(prints)) == len(prints) - 1


def test_of_large_tensors_some_elements_are_seen() -> None:
    x = torch.zeros(1_000_003)
    y = x + 1e-3 * torch.randn_like(x)
    assert fingerprint(x) != fingerprint(y)
    assert fingerprint(x.numpy()) != fingerprint(y.numpy())
    assert fingerprint(x) != fingerprint(x[:-1])


def test_what_has_no_values_is_left_out() -> None:
    assert fingerprint([object(), None]) == 0
    assert fingerprint(torch.empty(3, device="meta")) == 0
    assert fingerprint(np.array([object()])) == 0


def test_another_batch_is_refused_by_stage_and_place() -> None:
    identity = BatchFingerprint(7, "batch 3 of training epoch 1")
    identity.validate(7, 2)
    with pytest.raises(
        MisconfigurationException,
        match=r"batch 3 of training epoch 1.*stage 1: 00000008, stage 2: 00000007.*seed",
    ):
        identity.validate(8, 2)
    with pytest.raises(MisconfigurationException, match="replica 4: 00000007, replica 5: 00000001"):
        identity.compare({4: 7, 5: 1}, "replica")


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
