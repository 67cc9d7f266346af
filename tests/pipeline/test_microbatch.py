from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.pipeline.microbatch import (
    MicroBatch,
    Scalar,
    merge,
    samples,
    share,
    split,
    weigh,
)
from lightning_axosparse.pipeline.reductions import Weighting


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
    assert torch.equal(merge([p.batch for p in parts], [p.weight for p in parts])[0], batch[0])


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
    assert second["sample"] == Sample(second["sample"].x, "all")
    assert second["sample"].x.shape == (2,)
    assert first["rate"] is batch["rate"]
    assert first["none"] is None
    assert samples(batch) == 4


def test_tensors_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\].*split_batch"):
        split((torch.zeros(4), torch.zeros(3, 3)), 2)


def test_a_batch_without_tensors_is_one_microbatch() -> None:
    assert [part.batch for part in split([1, 2], 4)] == [[1, 2]]


def test_parts_of_a_user_are_weighed_by_their_samples() -> None:
    parts = weigh([torch.zeros(3), torch.zeros(1)])
    assert [(part.size, part.weight) for part in parts] == [(3, 0.75), (1, 0.25)]


def scalar(value: float) -> Scalar:
    return Scalar(torch.tensor(value), Weighting())


def test_outputs_are_merged() -> None:
    outputs: list[Any] = [
        {"loss": scalar(1.0), "preds": torch.zeros(3), "n": [1, 2], "f": 1.0, "s": "x"},
        {"loss": scalar(5.0), "preds": torch.ones(1), "n": [3], "f": 5.0, "s": "x"},
    ]
    merged = merge(outputs, [0.75, 0.25])
    assert merged["loss"] == 2.0
    assert merged["preds"].tolist() == [0, 0, 0, 1]
    assert merged["n"] == [1, 2, 3]
    assert merged["f"] == 2.0
    assert merged["s"] == "x"
    assert merge([None, None], [0.5, 0.5]) is None
    pairs = merge([Pair(torch.zeros(1), torch.ones(1))] * 2, [0.5, 0.5])
    assert isinstance(pairs, Pair)
    assert pairs.y.tolist() == [1, 1]


@given(st.integers(0, 9), st.integers(1, 5))
def test_shares_are_even_and_make_up_the_batch(count: int, shares: int) -> None:
    parts = [MicroBatch(None, 1, 1 / 9, number) for number in range(count)]
    each = [share(parts, index, shares) for index in range(shares)]
    assert [part.number for own in each for part in own] == list(range(count))
    assert max(map(len, each)) - min(map(len, each)) <= 1
