from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import default_collate
from transformers import BatchEncoding

from lightning_axosparse.pipeline.batch_layout import BatchLayout, collated, inferred

CLASSES = ["cat", "dog", "cow", "owl"]


def paths(layout: BatchLayout) -> dict[str, int]:
    return {"".join(path): dim for path, dim in layout.dims.items()}


def whole(layout: BatchLayout) -> list[str]:
    return ["".join(path) for path in layout.whole]


@given(size=st.integers(1, 5))
def test_default_collate_puts_the_batch_first(size: int) -> None:
    sample = {
        "x": torch.rand(size, 2),
        "id": "a",
        "pair": ("b", 1),
        "classes": CLASSES,
        "array": np.zeros(size),
        "y": 2.5,
    }
    batch = default_collate([sample] * size)
    layout = collated(batch)
    assert set(layout.sizes(batch).values()) == {size}
    assert not layout.whole
    part = layout.cut(batch, 0, 1)
    one = default_collate([sample])
    assert part["pair"][0] == one["pair"][0]
    assert part["classes"] == one["classes"]
    assert torch.equal(part["array"], one["array"])


def test_a_batch_by_itself_is_cut_where_all_first_dimensions_agree() -> None:
    batch = (
        torch.rand(4, 3),
        [torch.rand(3, 5)] * 4,
        ["a", "b", "c", "d"],
        {"names": ["x", "y"]},
        np.zeros((4, 1)),
        torch.tensor(1.0),
        object(),
    )
    layout = inferred(batch)
    assert paths(layout) == {"[0]": 0, "[1]": 0, "[2]": 0, "[4]": 0}
    assert whole(layout) == ["[3]['names']", "[5]", "[6]"]
    assert layout.objects == (("[6]",),)
    assert paths(inferred([torch.rand(2, 2), torch.rand(2)])) == {"[0]": 0, "[1]": 0}
    assert paths(inferred(([torch.rand(3, 5)] * 2, [torch.rand(1, 5)] * 2))) == {"[0]": 0, "[1]": 0}
    assert paths(inferred(([torch.rand(3)] * 2, torch.rand(3)))) == {
        "[0][0]": 0,
        "[0][1]": 0,
        "[1]": 0,
    }
    assert paths(inferred(([torch.rand(3)] * 2, [torch.rand(3)] * 2), 2)) == {"[0]": 0, "[1]": 0}


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((torch.rand(4, 2), torch.rand(4), torch.rand(3, 2)), r"batch\[2\] of shape \(3, 2\)"),
        (
            {"x": torch.rand(7, 4, 2), "y": torch.rand(4), "z": np.zeros(4)},
            r"batch\['x'\].*4 samples",
        ),
        (([torch.rand(3, 5)] * 4, [torch.rand(3)] * 4), r"batch\[0\] is a list of 4 entries"),
        ({"images": [torch.rand(3, 5)] * 4}, r"batch\['images'\] is a list of 4"),
    ],
)
def test_an_ambiguous_batch_is_refused_by_name(batch: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        inferred(batch)


def test_other_leaves_than_known_do_not_fit() -> None:
    layout = inferred({"x": torch.rand(4, 1), "n": 3})
    assert layout.fits({"x": torch.rand(2, 1), "n": 5})
    assert not layout.fits({"x": torch.rand(2, 1), "y": torch.rand(2), "n": 5})
    assert not layout.fits({"n": 5})
    assert not layout.fits({"x": None, "n": 5})


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass
class Made:
    x: Tensor
    length: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.x.sum(1)


@dataclass(frozen=True)
class Frozen:
    x: Tensor


class Words(list):
    pass


def test_containers_keep_their_types_and_what_else_they_carry() -> None:
    lookup: defaultdict[str, Any] = defaultdict(list, x=torch.rand(4))
    made = Made(torch.rand(4, 2))
    made.length += 1
    batch = {
        "default": lookup,
        "ordered": OrderedDict(x=torch.rand(4)),
        "hf": BatchEncoding({"ids": torch.arange(4)}),
        "proxy": MappingProxyType({"x": torch.rand(4)}),
        "pair": Pair(torch.rand(4), None),
        "made": made,
        "frozen": Frozen(torch.rand(4)),
        "words": Words("abcd"),
    }
    layout = pickle.loads(pickle.dumps(inferred(batch)))
    part = layout.cut(batch, 1, 3)
    assert {key: type(value) for key, value in part.items()} == {
        key: type(value) for key, value in batch.items()
    }
    assert part["default"]["missing"] == []
    assert part["hf"].ids.tolist() == [1, 2]
    assert torch.equal(part["made"].length, made.length[1:3])
    assert part["words"] == ["b", "c"]
    assert len(batch["ordered"]["x"]) == 4, "the batch itself stays whole"
    assert len(made.x) == 4
