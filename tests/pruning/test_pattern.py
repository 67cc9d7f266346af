from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.pruning.mask_rule import MaskRule
from lightning_axosparse.pruning.pattern import Blocks, Entries, NOfM, parse_pattern

small = settings(max_examples=30)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [(None, Entries()), ("2:4", NOfM(2, 4)), ("4x1", Blocks(4, 1)), ("16x16", Blocks(16, 16))],
)
def test_texts_that_name_a_pattern(text, pattern):
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize("text", ["", "4", "4:2", "4:4", "0x4", "2:4:8", "2 : 4", "x4", "a:b"])
def test_texts_that_name_none(text):
    assert parse_pattern(text) is None


def layer(seed, outputs, inputs, ties=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    with torch.no_grad():
        values = torch.randn(outputs, inputs)
        model[0].weight.copy_(values.mul(2).round() if ties else values)
    return model, model[0].weight.detach()


def mask_of(model, ratio, pattern, **others):
    rule = MaskRule(ratio, "magnitude", pattern=parse_pattern(pattern), **others)
    return rule.masks(model)["0.weight"]


@small
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(2, 8),
    st.data(),
    st.booleans(),
)
def test_of_every_m_inputs_the_n_highest_are_kept(seed, outputs, groups, m, data, ties):
    n = data.draw(st.integers(1, m - 1))
    model, weight = layer(seed, outputs, groups * m, ties)
    mask = mask_of(model, 1 - n / m, f"{n}:{m}").reshape(-1, m)
    assert (mask.sum(1) == n).all()
    for row, kept in zip(weight.abs().reshape(-1, m).tolist(), mask.tolist(), strict=True):
        order = sorted(range(m), key=lambda i: (row[i], i))
        assert [i for i in range(m) if kept[i]] == sorted(order[m - n :])


@small
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(0, 0.95),
)
def test_the_blocks_of_largest_sum_are_kept(seed, rows, columns, down, across, ratio):
    model, weight = layer(seed, rows * down, columns * across)
    mask = mask_of(model, ratio, f"{rows}x{columns}")
    blocks = {
        (i, j): (
            float(weight[i : i + rows, j : j + columns].abs().sum()),
            {*mask[i : i + rows, j : j + columns].reshape(-1).tolist()},
        )
        for i in range(0, rows * down, rows)
        for j in range(0, columns * across, columns)
    }
    assert all(len(values) == 1 for _, values in blocks.values())
    kept = [total for total, values in blocks.values() if True in values]
    pruned = [total for total, values in blocks.values() if False in values]
    assert len(pruned) == round(ratio * len(blocks))
    assert not pruned or not kept or min(kept) >= max(pruned) - 1e-5


def test_convolutions_keep_by_kernel_position_and_transposed_weights_by_their_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ConvTranspose2d(4, 6, 3), nn.Linear(8, 2))
    masks = MaskRule(0.5, "magnitude", pattern=NOfM(2, 4)).masks(model)
    assert (masks["0.weight"].unflatten(1, (-1, 4)).sum(2) == 2).all()
    assert (masks["1.weight"].unflatten(0, (-1, 4)).sum(1) == 2).all()
    blocks = MaskRule(0.5, "magnitude", pattern=Blocks(2, 1)).masks(model)
    assert torch.equal(blocks["0.weight"][::2], blocks["0.weight"][1::2])
    assert torch.equal(blocks["1.weight"][:, ::2], blocks["1.weight"][:, 1::2])
    assert all(mask.is_contiguous() for mask in [*masks.values(), *blocks.values()])


def test_floors_densities_and_stages_count_blocks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.mul_(100)

    def kept(**others):
        rule = MaskRule(0.75, "magnitude", pattern=Blocks(4, 2), **others)
        stages = {"0.weight": {0}, "1.weight": {1}, "2.weight": {1}}
        return [int(mask.sum()) // 8 for mask in rule.masks(model, stages=stages).values()]

    assert kept() == [10, 0, 0]
    assert kept(floor=0.5) == [7, 2, 1]
    assert kept(scope="layer") == [4, 4, 2]
    assert kept(scope={"2.weight": 0.5}) == [6, 0, 4]
    assert kept(stage_imbalance=1.0)[0] == 5


def test_a_nan_is_named_behind_a_pattern():
    for pattern in ("2:4", "2x2"):
        model, _ = layer(0, 4, 8)
        with torch.no_grad():
            model[0].weight[1, 2] = torch.nan
        with pytest.raises(ValueError, match=r"NaN in 0\.weight"):
            mask_of(model, 0.5, pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Blocks(4, 1), r"4 outputs x 1 inputs.*0\.weight \(6, 8\)\. .*prune=.'0\.weight': False"),
        (NOfM(1, 3), r"1 outputs x 3 inputs.*0\.weight \(6, 8\)"),
    ],
)
def test_what_the_pattern_does_not_divide_is_named(pattern, message):
    model, _ = layer(0, 6, 8)
    ratio = pattern.ratio if isinstance(pattern, NOfM) else 0.5
    with pytest.raises(ValueError, match=message):
        MaskRule(ratio, pattern=pattern).shares(model)
    with pytest.raises(ValueError, match=r"0\.bias \(6,\)"):
        MaskRule(0.5, pattern=Blocks(2, 2), prune={"bias": True}).shares(
            nn.Sequential(nn.Linear(8, 6))
        )
