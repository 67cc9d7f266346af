from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.pruning.magnitude import magnitude_masks, prunable
from tests.pruning.stages import make_parameters, on_stage
from tests.ranks import run_ranks

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def sizes_of(parameters):
    return {name: parameter.shape for name, parameter in parameters.items()}


def one_process(parameters, ratio, scope="global"):
    return magnitude_masks(parameters, parameters.keys(), sizes_of(parameters), ratio, scope)


def sorted_masks(parameters, ratio):
    """The definition: sort all magnitudes, ties in global order, and prune the first."""
    flat = torch.cat([p.reshape(-1).abs().double() for p in parameters.values()])
    mask = torch.ones(len(flat), dtype=torch.bool)
    mask[flat.argsort(stable=True)[: round(ratio * len(flat))]] = False
    parts = mask.split([p.numel() for p in parameters.values()])
    return {
        name: part.view(parameters[name].shape)
        for name, part in zip(parameters, parts, strict=True)
    }


def assert_equal(masks, expected):
    assert list(masks) == list(expected)
    for name, mask in masks.items():
        assert mask.dtype == torch.bool
        assert torch.equal(mask, expected[name]), name


@given(st.integers(0, 10**6), dtypes, st.booleans(), st.floats(0, 0.999))
def test_the_global_threshold_is_exact(seed, dtype, ties, ratio):
    parameters = make_parameters(seed, dtype, ties)
    assert_equal(one_process(parameters, ratio), sorted_masks(parameters, ratio))


@given(st.integers(0, 10**6), dtypes, st.booleans(), st.floats(0, 0.999))
def test_layer_scope_prunes_each_parameter_by_the_ratio(seed, dtype, ties, ratio):
    parameters = make_parameters(seed, dtype, ties)
    expected = {name: sorted_masks({name: p}, ratio)[name] for name, p in parameters.items()}
    assert_equal(one_process(parameters, ratio, "layer"), expected)


def test_mixed_precisions_and_extreme_magnitudes():
    parameters = {
        "a": torch.tensor([[float("inf"), 1e-45, 0.0, -0.0]]),
        "b": torch.tensor([[-1e300, 1.0, 1e-320, -float("inf")]], dtype=torch.float64),
        "c": torch.tensor([[3e38, -1e-40]], dtype=torch.bfloat16),
    }
    for ratio in (0.1, 0.2, 0.5, 0.8, 0.9):
        assert_equal(one_process(parameters, ratio), sorted_masks(parameters, ratio))


def test_strided_weights_keep_their_own_order():
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    masks = one_process({"w": weight}, 0.7)
    assert_equal(masks, sorted_masks({"w": weight.contiguous()}, 0.7))


def test_ratio_zero_keeps_all():
    parameters = make_parameters(0, torch.float32, ties=False)
    assert all(mask.all() for mask in one_process(parameters, 0.0).values())


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5])
def test_ratios_out_of_range_are_rejected(ratio):
    with pytest.raises(ValueError, match=str(ratio)):
        one_process(make_parameters(0, torch.float32, ties=False), ratio)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_nan_is_rejected_by_name(scope):
    parameters = make_parameters(0, torch.float32, ties=False)
    parameters["b.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        one_process(parameters, 0.5, scope)


def test_names_that_no_rank_counts_are_rejected():
    parameters = make_parameters(0, torch.float32, ties=False)
    with pytest.raises(ValueError, match=r"exactly one rank: a\.weight"):
        magnitude_masks(parameters, parameters.keys() - {"a.weight"}, sizes_of(parameters), 0.5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.LSTM(4, 4))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.elsewhere = nn.Linear(4, 4, device="meta")
        self.table = nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False)


def test_prunable_parameters_in_module_order():
    model = Model()
    assert prunable(model) == {
        "embedding.weight": (5, 4),
        "layers.0.weight": (4, 4, 3),
        "layers.2.weight_ih_l0": (16, 4),
        "layers.2.weight_hh_l0": (16, 4),
        "elsewhere.weight": (4, 4),
    }
    assert list(prunable(model)) == [n for n, _ in model.named_parameters() if n in prunable(model)]
    assert list(prunable(model, ["layers.*", "*bedding*"])) == ["elsewhere.weight"]


CASES = [
    (seed, dtype, ties, ratio, scope)
    for seed, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    for ties in (False, True)
    for ratio in (0.0, 0.5, 0.9, 0.99)
    for scope in ("global", "layer")
]


def masks_of_a_stage(stage, stages, group):
    found = []
    for seed, dtype, ties, ratio, scope in CASES:
        parameters = make_parameters(seed, dtype, ties)
        held, counted = on_stage(parameters, stages, stage)
        held["not.prunable"] = torch.ones(3)
        found.append(magnitude_masks(held, counted, sizes_of(parameters), ratio, scope, group))
    if "b.weight" in counted:
        held["b.weight"] = held["b.weight"] * torch.nan
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        magnitude_masks(held, counted, sizes_of(parameters), 0.5, "global", group)
    return found


def on_two_and_three_stages():
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.backend import init_process_group

    init_process_group("cpu")
    rank, two = dist.get_rank(), dist.new_group([0, 1])
    found = {3: masks_of_a_stage(rank, 3, dist.group.WORLD)}
    if rank < 2:
        found[2] = masks_of_a_stage(rank, 2, two)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def masks_by_rank():
    return run_ranks(3, on_two_and_three_stages)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_compute_the_masks_of_one_process(masks_by_rank, stages):
    for number, (seed, dtype, ties, ratio, scope) in enumerate(CASES):
        parameters = make_parameters(seed, dtype, ties)
        expected = one_process(parameters, ratio, scope)
        for stage in range(stages):
            held, _ = on_stage(parameters, stages, stage)
            names = [name for name in parameters if name in held]
            assert_equal(masks_by_rank[stage][stages][number], {n: expected[n] for n in names})
