from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_axosparse.pipeline.loss.outputs import Scalar, merge
from lightning_axosparse.pipeline.loss.terms import Leaf
from lightning_axosparse.pipeline.microbatch import MicroBatch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    name: str


def scalar(value: float) -> Scalar:
    return Scalar(torch.tensor(value), Leaf(torch.tensor(value)))


def parts(*sizes: int) -> list[MicroBatch]:
    return [MicroBatch(None, size, size / sum(sizes)) for size in sizes]


def test_outputs_are_merged() -> None:
    outputs: list[Any] = [
        {"loss": scalar(1.0), "preds": torch.zeros(3), "n": [1, 2], "f": 1.0, "s": "x"},
        {"loss": scalar(5.0), "preds": torch.ones(1), "n": [3], "f": 5.0, "s": "x"},
    ]
    merged = merge(outputs, parts(3, 1))
    assert merged["loss"] == 2.0
    assert merged["preds"].tolist() == [0, 0, 0, 1]
    assert merged["n"] == [1, 2, 3]
    assert merged["f"] == 2.0
    assert merged["s"] == "x"
    assert merge([None, None], parts(1, 1)) is None
    pairs = merge([Pair(torch.zeros(1), torch.ones(1))] * 2, parts(1, 1))
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
    merged = merge(outputs, parts(3, 1))
    assert merged["time first"].shape == (7, 4, 2)
    assert merged["array"].tolist() == [1] * 4
    assert [len(found["boxes"]) for found in merged["found"]] == [0, 1, 2, 0]
    assert (merged["pair"][0].shape, merged["pair"][1]) == ((4,), 0.5)
    assert (merged["n"], merged["rate"]) == (4, 2.5)
    assert merged["first alone"] == 2
    assert merged["none"].tolist() == [1, 1]


def test_merged_outputs_keep_their_types() -> None:
    outputs = [Sample(torch.zeros(1), "all"), Sample(torch.ones(2), "all")]
    merged = merge(outputs, parts(1, 2))
    assert (type(merged), merged.name) == (Sample, "all")
    assert merged.x.tolist() == [0, 1, 1]
    ordered = merge([OrderedDict(a=torch.ones(1))] * 2, parts(1, 1))
    assert isinstance(ordered, OrderedDict)


@pytest.mark.parametrize("value", [3, True, "x"])
def test_values_that_nobody_can_merge_are_warned_of(value: Any) -> None:
    with pytest.warns(UserWarning, match=r"output\['hits'\].*the first is kept"):
        merged = merge([{"hits": value}, {"hits": type(value)()}], parts(2, 2))
    assert merged == {"hits": value}


@pytest.mark.parametrize("other", [torch.tensor(1.0), [torch.ones(1)], "text"])
def test_other_types_in_other_micro_batches_are_refused_by_key(other: Any) -> None:
    with pytest.raises(ValueError, match=r"output\['loss'\]\['a'\].*`training_step`"):
        merge([{"loss": {"a": torch.ones(1)}}, {"loss": {"a": other}}], parts(1, 1))
