from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding

from lightning_axosparse.pipeline.batch_layout import BatchLayout, collated, inferred, observed

WEIGHTS = torch.rand(4)
CLASSES = ["cat", "dog", "cow", "owl"]


def paths(layout: BatchLayout) -> dict[str, int]:
    return {"".join(path): dim for path, dim in layout.dims.items()}


def whole(layout: BatchLayout) -> list[str]:
    return ["".join(path) for path in layout.whole]


def probe(collate: Callable[[list], Any], sample: Any) -> BatchLayout | None:
    return observed(collate([sample] * 2), collate([sample] * 3))


def detection(samples: list) -> Any:
    images, targets = zip(*samples, strict=True)
    return images, list(targets)


def time_first(samples: list) -> dict[str, Any]:
    sounds, labels = zip(*samples, strict=True)
    return {
        "sound": torch.stack(sounds, 1),
        "label": np.array(labels),
        "weights": WEIGHTS,
        "classes": CLASSES,
        "count": len(samples),
        "positions": torch.arange(len(sounds[0])),
    }


def test_one_list_entry_a_sample_is_cut_as_a_list() -> None:
    layout = probe(detection, (torch.rand(3, 5), {"boxes": torch.rand(2, 4)}))
    assert layout is not None
    assert paths(layout) == {"[0]": 0, "[1]": 0}
    images, targets = detection(
        [(torch.rand(3, 5), {"boxes": torch.rand(n, 4)}) for n in (3, 3, 1, 0)]
    )
    assert layout.fits((images, targets))
    assert layout.sizes((images, targets)) == {("[0]",): 4, ("[1]",): 4}
    part = layout.cut((images, targets), 1, 3)
    assert part[0][0] is images[1]
    assert isinstance(part[0], tuple)
    assert part[1] == targets[1:3]


@given(length=st.integers(1, 9), size=st.integers(1, 9), lo=st.integers(0, 8))
def test_what_follows_the_samples_is_cut_whatever_sizes_agree(
    length: int, size: int, lo: int
) -> None:
    layout = probe(time_first, (torch.rand(length, 2), 1))
    assert layout is not None
    assert paths(layout) == {"['sound']": 1, "['label']": 0}
    assert whole(layout) == ["['weights']", "['classes']", "['count']", "['positions']"]
    # A batch of as many samples as there are classes, words or moments is cut alike.
    batch = time_first([(torch.rand(length, 2), i) for i in range(size)])
    assert layout.fits(batch)
    assert set(layout.sizes(batch).values()) == {size}
    lo = min(lo, size)
    part = layout.cut(batch, lo, size)
    assert torch.equal(part["sound"], batch["sound"][:, lo:])
    assert part["label"].tolist() == list(range(lo, size))
    assert part["weights"] is WEIGHTS
    assert part["classes"] is CLASSES


@pytest.mark.parametrize(
    ("collate", "named"),
    [
        (lambda samples: {"views": torch.cat([*samples, *samples])}, r"batch\['views'\].*\(4, 2\)"),
        (lambda samples: (torch.zeros(len(samples), len(samples)),), r"batch\[0\].*\(2, 2\)"),
        (lambda samples: pack_sequence([torch.rand(3, 2) for _ in samples]), r"batch\.data"),
        (lambda samples: samples * 2, r"batch has shape \(4,\)"),
    ],
)
def test_what_follows_the_samples_in_another_way_is_refused_by_name(
    collate: Callable[[list], Any], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s){named}.*split_batch"):
        probe(collate, torch.rand(1, 2))


def test_nothing_is_seen_where_nothing_follows_or_structures_differ() -> None:
    assert probe(lambda samples: torch.zeros(8, 3), torch.rand(2)) is None
    assert probe(lambda samples: {f"of {len(samples)}": torch.zeros(2)}, torch.rand(2)) is None
    assert probe(lambda samples: torch.zeros((1,) * len(samples)), torch.rand(2)) is None


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
    with pytest.raises(ValueError, match=rf"{named}.*split_batch"):
        inferred(batch)


def test_other_leaves_than_known_do_not_fit() -> None:
    layout = inferred({"x": torch.rand(4, 1), "n": 3})
    assert layout.fits({"x": torch.rand(2, 1), "n": 5})
    assert not layout.fits({"x": torch.rand(2, 1), "y": torch.rand(2), "n": 5})
    assert not layout.fits({"n": 5})


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
