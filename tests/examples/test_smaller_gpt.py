from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.examples.smaller_gpt import smaller_gpt

SHAPE = {"width": 96, "depth": 4, "heads": 4, "context": 16, "learning_rate": 1e-3}


def size(model, matrices=False):
    parameters = [p for p in model.parameters() if p.dim() > 1 or not matrices]
    return sum(parameter.numel() for parameter in parameters)


@settings(max_examples=20)
@given(
    ratio=st.sampled_from([0.1, 0.5, 0.8, 0.95]),
    kept=st.sampled_from([1.0, 17 / 16]),
    divisor=st.integers(1, 4),
)
def test_no_other_width_is_closer_to_what_the_pruned_model_takes(ratio, kept, divisor):
    whole = GPT(**SHAPE)
    model = smaller_gpt(ratio, kept, depth_divisor=divisor, **SHAPE)
    pruned = size(whole, matrices=True)
    budget = size(whole) - pruned + (1 - ratio) * pruned * kept
    shape = {**SHAPE, "depth": 4 // divisor}
    width = model.hparams.width
    assert width % 4 == 0
    for other in {max(4, width - 4), width + 4}:
        assert abs(size(model) - budget) <= abs(size(GPT(**{**shape, "width": other})) - budget)


def test_depth_and_rate():
    model = smaller_gpt(0.8, 1.0, depth_divisor=2, learning_rate_factor=2.0, **SHAPE)
    assert (model.hparams.depth, model.learning_rate) == (2, 2e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("pruning_ratio", 1.0), ("kept_weight", 0), ("depth_divisor", 0), ("heads", "two")],
)
def test_arguments_out_of_range_are_named(name, value):
    arguments = {"pruning_ratio": 0.5, "kept_weight": 1.0, **SHAPE, name: value}
    with pytest.raises(ValueError, match=f"^{name}="):
        smaller_gpt(**arguments)
