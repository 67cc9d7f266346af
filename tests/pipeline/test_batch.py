from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.pipeline.batch import BatchFingerprint, checksum


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=6), st.integers(0, 5))
def test_a_checksum_sees_every_value(values: list[float], position: int) -> None:
    tensor = torch.tensor(values)
    other = tensor.clone()
    other[position % len(values)] += 1.0
    nested = {"x": [tensor, "a"], "y": 1}
    assert checksum(nested) == checksum({"x": [tensor.clone(), "a"], "y": 1})
    if not torch.equal(tensor, other):
        assert checksum(nested) != checksum({"x": [other, "a"], "y": 1})


def test_a_checksum_sees_types_shapes_and_order() -> None:
    x = torch.arange(6.0)
    variants = [x, x.double(), x.bfloat16(), x.view(2, 3), x.view(2, 3).T, x.flip(0), x > 2]
    variants += [x.to(torch.complex64), [x], x.numpy(), ["a", "b"], ["b", "a"], [1], [1.0], []]
    prints = [checksum(variant) for variant in variants]
    assert checksum([x]) == checksum(x)
    assert len(set(prints)) == len(prints) - 1


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str


def test_a_checksum_sees_a_frozen_dataclass() -> None:
    pairs = [Pair(torch.zeros(2), "a"), Pair(torch.ones(2), "a"), Pair(torch.zeros(2), "b")]
    assert len({checksum(pair) for pair in pairs}) == 3
    assert checksum(pairs[0]) == checksum(Pair(torch.zeros(2), "a"))


def test_of_large_tensors_some_elements_are_seen() -> None:
    x = torch.zeros(1_000_003)
    y = x + 1e-3 * torch.randn_like(x)
    assert checksum(x) != checksum(y)
    assert checksum(x.numpy()) != checksum(y.numpy())
    assert checksum(x) != checksum(x[:-1])


def test_what_has_no_values_is_left_out() -> None:
    assert checksum([object(), None]) == 0
    assert checksum(torch.empty(3, device="meta")) == 0
    assert checksum(np.array([object()])) == 0


def test_another_batch_is_refused_by_stage_and_place() -> None:
    identity = BatchFingerprint(7, "batch 3 of training epoch 1")
    identity.validate(7, 2)
    with pytest.raises(
        MisconfigurationException,
        match=r"batch 3 of training epoch 1.*stage 1: 00000008, stage 2: 00000007.*seed",
    ):
        identity.validate(8, 2)
