"""The grid that is chosen is the fastest that fits, and the choice explains itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse.pipeline.profile import LayerProfile
from lightning_axosparse.planning.automatic import choose, layer_costs, machine, timeless
from lightning_axosparse.planning.memory import DENSE
from lightning_axosparse.planning.search import Job

LAYERS = [nn.Linear(100, 100, bias=False) for _ in range(8)]
STATE = 16 * 10_000  # bytes of a layer's weights, gradients and moments
MODULE = nn.Sequential(*LAYERS)


def job(memory: float, profile: LayerProfile | None = None, ranks: int = 8) -> Job:
    profiles = None if profile is None else [profile] * len(LAYERS)
    cluster = machine("cpu", ranks, ranks, memory)
    costs = layer_costs(MODULE, LAYERS, profiles)
    return Job(costs, timeless(cluster) if profile is None else cluster, 0, DENSE)


@pytest.mark.parametrize(("layers", "stages"), [(8, 1), (7, 2), (4, 2), (3, 4), (1, 8)])
def test_by_parameters_alone_the_shortest_that_fits_is_best(layers: int, stages: int) -> None:
    assert choose(job(layers * STATE), None, None).g_inter == stages


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
    wanted = job(memory, LayerProfile(seconds, kept, kept // 2))
    try:
        decision = choose(wanted, microbatches, in_flight)
    except MisconfigurationException:
        return
    paces = [
        plan.simulation.makespan / (plan.g_data * plan.microbatches * plan.choice.microbatch)
        for plan in decision.fitting
    ]
    assert paces == sorted(paces)
    assert all(plan.memory <= memory for plan in decision.fitting)
    assert all(plan.memory > memory for plan in decision.too_large)
    grids = [plan.choice.g_inter for plan in decision.fitting + decision.too_large]
    assert sorted(grids) == [1, 2, 4, 8]


def test_activations_count_at_the_limit_that_fits() -> None:
    roomy, tight = (
        choose(job(memory, LayerProfile(0.01, STATE, 100), ranks=2), 8, None).fitting
        for memory in (100 * STATE, 13 * STATE)
    )
    limits = {plan.choice.g_inter: plan.choice.in_flight for plan in roomy}
    assert limits == {1: 2, 2: 4}
    # four layers a stage: their state, and four times what each keeps of two micro-batches
    assert {plan.choice.g_inter: plan.choice.in_flight for plan in tight} == {2: 2}


def test_slow_reductions_make_pipelines_worth_their_bubble() -> None:
    quick, slow = (choose(job(1e9, LayerProfile(s, 100, 100)), None, None) for s in (1e-7, 1.0))
    assert slow.g_inter == 1
    assert quick.g_inter > 1


def test_no_more_stages_than_layers_and_only_divisors() -> None:
    costs = layer_costs(nn.Sequential(*LAYERS[:3]), LAYERS[:3], None)
    wanted = Job(costs, timeless(machine("cpu", 12, 4, 1e9)), 0, DENSE)
    grids = {plan.choice.g_inter for plan in choose(wanted, None, None).fitting}
    assert grids == {1, 2, 3}


def test_the_choice_explains_itself() -> None:
    decision = choose(job(7 * STATE, LayerProfile(1.0, 0, 0)), None, None)
    told = str(decision)
    assert told.startswith("g_inter='auto' takes 2 stages x 4 replicas: 0.00064 of 0.00112 GB a ")
    assert "Next best: 4 stages x 2 replicas, 0.00032 GB, bubble 16%, " in told
    assert told.endswith("Too large: 1 stage x 8 replicas (0.00128 GB).")


def test_nothing_fits() -> None:
    with pytest.raises(MisconfigurationException, match=r"8 stages x 1 replica, .*about 0\.00016"):
        choose(job(STATE - 1), None, None)


def test_parameters_round_the_layers_are_held_by_every_stage() -> None:
    module = nn.ModuleDict({"layers": MODULE, "head": nn.Linear(100, 10, bias=False)})
    costs = layer_costs(module, LAYERS, None)
    assert costs.outside_weights == 1000
    assert costs.weights == (10_000,) * 8
