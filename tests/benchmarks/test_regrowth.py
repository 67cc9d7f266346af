from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.perplexity.regrowth import cosine_fraction, regrown
from lightning_axosparse.pruning.masks import MaskBits
from tests.pruning.stages import make_parameters


def masked(seed, density, dtype=torch.float32):
    """Weights that are zero where masked, with gradients everywhere."""
    weights = make_parameters(seed, dtype, ties=False)
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for name, weight in weights.items():
        masks[name] = torch.rand(weight.shape, generator=generator) < density
        weight.mul_(masks[name])
        weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
    return weights, MaskBits(masks)


@settings(max_examples=15)
@given(
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["random", "gradient"]),
)
def test_the_smallest_are_dropped_and_as_many_grow(seed, density, fraction, growth):
    weights, masks = masked(seed, density)
    new = regrown(weights, masks, fraction, growth, seed=3)
    assert list(new) == list(masks)
    for name, old in masks.items():
        weight, mask = weights[name], new[name]
        kept = int(old.sum())
        dropped = int(fraction * kept)
        assert int(mask.sum()) == kept
        smallest = weight.abs()[old].sort().values
        survive = old & (weight.abs() > (smallest[dropped - 1] if dropped else -1))
        assert (mask | ~survive).all()
        grown, left = mask & ~survive, ~mask
        assert int(grown.sum()) == dropped
        if growth == "gradient" and grown.any() and left.any():
            assert weight.grad.abs()[grown].min() >= weight.grad.abs()[left].max()


def test_random_growth_depends_on_the_seed_and_the_weight_alone():
    weights, masks = masked(0, 0.5)
    one, other = (regrown(weights, masks, 0.5, "random", seed) for seed in (1, 2))
    assert any(not torch.equal(mask, other[name]) for name, mask in one.items())
    turned = MaskBits({name: masks[name] for name in reversed(list(masks))})
    again = regrown(weights, turned, 0.5, "random", 1)
    assert all(torch.equal(mask, again[name]) for name, mask in one.items())


def test_random_growth_is_even():
    weights = {"w": torch.zeros(100, 100)}
    masks = MaskBits({"w": torch.arange(10_000).view(100, 100) < 2000})
    grown = regrown(weights, masks, 1.0, "random", 0)["w"]
    counts = grown.view(10, -1).sum(1)
    assert int(counts.sum()) == 2000
    assert 150 < int(counts.min()) <= int(counts.max()) < 250


def test_gradients_that_overflowed_or_are_missing_do_no_harm():
    weights, masks = masked(1, 0.5)
    weights["a.weight"].grad.fill_(torch.nan)
    weights["b.weight"].grad.fill_(torch.inf)
    weights["c.weight"].grad = None
    new = regrown(weights, masks, 0.3, "gradient", 0)
    assert all(int(mask.sum()) == int(masks[name].sum()) for name, mask in new.items())


def test_a_nan_weight_is_named():
    weights, masks = masked(1, 1.0)
    weights["b.weight"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        regrown(weights, masks, 0.3, "gradient", 0)


@given(st.floats(0.01, 0.99), st.lists(st.floats(0, 1), min_size=2))
def test_the_dropped_fraction_falls_as_in_the_paper(fraction, way):
    """Evci et al., section 3 (2)."""
    way.sort()
    dropped = [cosine_fraction(fraction, at) for at in way]
    assert dropped == sorted(dropped, reverse=True)
    assert all(0 <= each <= fraction for each in dropped)
    assert [cosine_fraction(0.3, n / 2) for n in range(3)] == pytest.approx([0.3, 0.15, 0])
