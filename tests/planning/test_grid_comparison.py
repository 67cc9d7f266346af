from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse.pipeline.profile import LayerProfile
from lightning_axosparse.planning.cost import default_cluster, layer_costs
from lightning_axosparse.planning.grid_comparison import compare_grids
from lightning_axosparse.planning.memory_model import DENSE
from lightning_axosparse.planning.search import Workload

LAYERS = [nn.Linear(100, 100, bias=False) for _ in range(8)]
STATE = 16 * 10_000  # bytes of a layer's weights, gradients and moments
MODULE = nn.Sequential(*LAYERS)


def workload(memory: float, profile: LayerProfile | None = None, ranks: int = 8) -> Workload:
    profiles = None if profile is None else [profile] * len(LAYERS)
    cluster = default_cluster("cpu", ranks, ranks, memory)
    costs = layer_costs(MODULE, LAYERS, profiles)
    return Workload(costs, cluster.with_free_transfers() if profile is None else cluster, 0, DENSE)


@pytest.mark.parametrize(("layers", "stages"), [(8, 1), (7, 2), (4, 2), (3, 4), (1, 8)])
def test_by_parameters_alone_the_shortest_that_fits_is_best(layers: int, stages: int) -> None:
    assert compare_grids(workload(layers * STATE), None, None).g_inter == stages


@settings(max_examples=25, deadline=None)
@given(
    memory=st.floats(STATE, 20 * STATE),
    seconds=st.floats(1e-6, 1.0),
    kept=st.integers(0, STATE),
    microbatches=st.none() | st.integers(1, 9),
    in_flight=st.none() | st.integers(1, 9),
)
def test_what_is_chosen_fits_and_nothing_that_fits_is_faster(
    memory: float, seconds: float, kept: int, microbatches: int | None, in_flight: int | None
) -> None:
    wanted = workload(memory, LayerProfile(seconds, kept, kept // 2))
    try:
        comparison = compare_grids(wanted, microbatches, in_flight)
    except MisconfigurationException:
        return
    paces = [
        plan.simulation.makespan / (plan.g_data * plan.microbatches * plan.choice.microbatch)
        for plan in comparison.fitting
    ]
    assert paces == sorted(paces)
    assert all(plan.memory <= memory for plan in comparison.fitting)
    assert all(plan.memory > memory for plan in comparison.too_large)
    grids = [plan.choice.g_inter for plan in comparison.fitting + comparison.too_large]
    assert sorted(grids) == [1, 2, 4, 8]


def test_activations_count_at_the_limit_that_fits() -> None:
    roomy, tight = (
        compare_grids(workload(memory, LayerProfile(0.01, STATE, 100), ranks=2), 8, None).fitting
        for memory in (100 * STATE, 13 * STATE)
    )
    limits = {plan.choice.g_inter: plan.choice.in_flight for plan in roomy}
    assert limits == {1: 2, 2: 4}
    # four layers a stage: their state, and four times what each keeps of two micro-batches
    assert {plan.choice.g_inter: plan.choice.in_flight for plan in tight} == {2: 2}


def test_slow_reductions_make_pipelines_worth_their_bubble() -> None:
    quick, slow = (
        compare_grids(workload(1e9, LayerProfile(s, 100, 100)), None, None) for s in (1e-7, 1.0)
    )
    assert slow.g_inter == 1
    assert quick.g_inter > 1


def test_no_more_stages_than_layers_and_only_divisors() -> None:
    costs = layer_costs(nn.Sequential(*LAYERS[:3]), LAYERS[:3], None)
    cluster = default_cluster("cpu", 12, 4, 1e9)
    wanted = Workload(costs, cluster.with_free_transfers(), 0, DENSE)
    grids = {plan.choice.g_inter for plan in compare_grids(wanted, None, None).fitting}
    assert grids == {1, 2, 3}


def test_the_chosen_grid_and_the_others_are_described() -> None:
    comparison = compare_grids(workload(7 * STATE, LayerProfile(1.0, 0, 0)), None, None)
    text = str(comparison)
    assert text.startswith("g_inter='auto' takes 2 stages x 4 replicas: 0.00064 of 0.00112 GB a ")
    assert "Next best: 4 stages x 2 replicas, 0.00032 GB, bubble 16%, " in text
    assert text.endswith("Too large: 1 stage x 8 replicas (0.00128 GB).")


def test_nothing_fits() -> None:
    with pytest.raises(MisconfigurationException, match=r"8 stages x 1 replica, .*about 0\.00016"):
        compare_grids(workload(STATE - 1), None, None)
