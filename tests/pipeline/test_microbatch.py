from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.pipeline.batch_layout import BatchLayout
from lightning_axosparse.pipeline.microbatch import (
    MicroBatch,
    Scalar,
    even_parts,
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
    ("samples", "wanted", "sharing", "parts"),
    [(10, 4, 1, 5), (7, 4, 1, 7), (8, 4, 1, 4), (997, 8, 1, 1), (9, 4, 2, 3), (12, 4, 3, 3)],
)
def test_even_parts(samples: int, wanted: int, sharing: int, parts: int) -> None:
    assert even_parts(samples, wanted, sharing) == parts


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_even_parts_divide_the_batch(samples: int, wanted: int, sharing: int) -> None:
    parts = even_parts(samples, wanted, sharing)
    assert samples % parts == 0
    assert samples % sharing or parts % sharing == 0
    assert samples % wanted or wanted % sharing or parts == wanted


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


def test_outputs_follow_the_samples() -> None:
    outputs: list[Any] = [
        {
            "time first": torch.zeros(7, size, 2),
            "array": np.ones(size),
            "found": [{"boxes": torch.zeros(number, 4)} for number in range(size)],
            "pair": (torch.zeros(size), 0.5),
            "n": size,
            "rate": np.array(float(size)),
        }
        for size in (3, 1)
    ]
    outputs[0]["first alone"] = scalar(2.0)
    outputs[0]["none"], outputs[1]["none"] = None, torch.ones(2)
    merged = merge(outputs, [0.75, 0.25], [3, 1])
    assert merged["time first"].shape == (7, 4, 2)
    assert merged["array"].tolist() == [1] * 4
    assert [len(found["boxes"]) for found in merged["found"]] == [0, 1, 2, 0]
    assert (merged["pair"][0].shape, merged["pair"][1]) == ((4,), 0.5)
    assert (merged["n"], merged["rate"]) == (4, 2.5)
    assert merged["first alone"] == 2
    assert merged["none"].tolist() == [1, 1]


def test_merged_outputs_keep_their_types() -> None:
    outputs = [Sample(torch.zeros(1), "all"), Sample(torch.ones(2), "all")]
    merged = merge(outputs, [1 / 3, 2 / 3])
    assert merged == Sample(merged.x, "all")
    assert merged.x.tolist() == [0, 1, 1]
    ordered = merge([OrderedDict(a=torch.ones(1))] * 2, [0.5, 0.5])
    assert isinstance(ordered, OrderedDict)


@pytest.mark.parametrize("value", [3, True, "x"])
def test_values_that_nobody_can_merge_are_warned_of(value: Any) -> None:
    with pytest.warns(UserWarning, match=r"output\['hits'\].*the first is kept"):
        merged = merge([{"hits": value}, {"hits": type(value)()}], [0.5, 0.5], [2, 2])
    assert merged == {"hits": value}


@pytest.mark.parametrize("other", [torch.tensor(1.0), [torch.ones(1)], "text"])
def test_other_types_in_other_micro_batches_are_refused_by_key(other: Any) -> None:
    with pytest.raises(ValueError, match=r"output\['loss'\]\['a'\].*`training_step`"):
        merge([{"loss": {"a": torch.ones(1)}}, {"loss": {"a": other}}], [0.5, 0.5])


@given(st.integers(0, 9), st.integers(1, 5))
def test_shares_are_even_and_make_up_the_batch(count: int, shares: int) -> None:
    parts = [MicroBatch(None, 1, 1 / 9, number) for number in range(count)]
    each = [share(parts, index, shares) for index in range(shares)]
    assert [part.number for own in each for part in own] == list(range(count))
    assert max(map(len, each)) - min(map(len, each)) <= 1
