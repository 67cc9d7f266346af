from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.planning.cost import (
    DENSE,
    SPARSE,
    Cluster,
    Transformer,
)
from lightning_axosparse.planning.search import Choice, Workload, evaluate, search
from lightning_axosparse.planning.simulate import Wire

MODEL = Transformer(layers=8, width=256, heads=4, sequence=128, vocabulary=1000)
CLUSTER = Cluster(
    devices=8,
    devices_per_node=4,
    memory=1e12,
    speed=1e12,
    memory_bandwidth=1e11,
    node=Wire(1e-6, 1e10),
    network=Wire(1e-5, 1e9),
)
WORKLOAD = Workload(MODEL.costs, CLUSTER, batch=32, storage=DENSE)
DIVISORS_OF_32 = (1, 2, 4, 8, 16, 32)


def everything(workload: Workload) -> list:
    """All choices there are, without the bounds that the search prunes by."""
    return [
        evaluate(workload, Choice(g_inter, microbatch, in_flight))
        for g_inter in (1, 2, 4, 8)
        for microbatch in DIVISORS_OF_32
        if workload.batch * g_inter % (8 * microbatch) == 0
        for in_flight in {
            min(limit, workload.batch * g_inter // 8 // microbatch)
            for limit in (g_inter, 2 * g_inter if g_inter > 1 else 1)
        }
    ]


@settings(max_examples=25, deadline=None)
@given(
    network=st.floats(1e6, 1e10),
    memory=st.floats(5e7, 1e9),
    latency=st.floats(0, 0.05),
    recompute=st.booleans(),
)
def test_the_search_finds_the_best_of_all_that_fit(
    network: float,
    memory: float,
    latency: float,
    recompute: bool,
) -> None:
    cluster = replace(CLUSTER, memory=memory, network=Wire(latency, network))
    workload = replace(WORKLOAD, cluster=cluster, recompute=recompute)
    fitting = [plan for plan in everything(workload) if plan.memory <= memory]
    if not fitting:
        with pytest.raises(ValueError, match="Nothing fits"):
            search(workload)
        return
    found = search(workload, best=3)
    expected = sorted(plan.simulation.makespan for plan in fitting)
    assert [plan.simulation.makespan for plan in found] == pytest.approx(expected[:3])
    assert all(plan.memory <= memory for plan in found)
    assert len({plan.choice for plan in found}) == len(found)


def test_without_communication_or_optimizer_a_step_takes_the_closed_form() -> None:
    free = Wire()
    cluster = replace(CLUSTER, node=free, network=free, memory_bandwidth=float("inf"))
    model = replace(MODEL, vocabulary=0)
    plan = evaluate(replace(WORKLOAD, layers=model.costs, cluster=cluster), Choice(4, 2, 4))
    assert (plan.g_data, plan.microbatches) == (2, 8)
    stage = 3 * 2 * 2 * model.layer_flops / cluster.speed
    assert plan.simulation.makespan == pytest.approx((8 + 4 - 1) * stage)
    assert plan.simulation.bubble == pytest.approx(3 / 11)


def test_memory_is_state_and_activations_of_the_fullest_stage() -> None:
    plan = evaluate(WORKLOAD, Choice(4, 2, 3))
    weights = 2 * MODEL.layer_weights + MODEL.embedding_weights
    logits = 2 * 128 * 1000 * 4
    activations = 2 * 3 * 2 * MODEL.layer_activation_bytes
    assert plan.memory == pytest.approx(16 * weights + activations + logits)
    recomputed = evaluate(replace(WORKLOAD, recompute=True), Choice(4, 2, 3))
    saved = 2 * (3 * 2 * MODEL.message_bytes + MODEL.layer_activation_bytes)
    assert recomputed.memory == pytest.approx(16 * weights + saved + logits)


def test_the_stage_with_the_head_gets_fewer_blocks() -> None:
    heavy = replace(MODEL, vocabulary=int(2 * MODEL.layer_flops / MODEL.head_flops * 1000))
    workload = replace(
        WORKLOAD, layers=heavy.costs, cluster=replace(CLUSTER, node=Wire(), network=Wire())
    )
    busy = evaluate(workload, Choice(2, 1, 2)).simulation.busy
    # eight blocks and a head that costs as much as two: five units each
    assert busy[0] == pytest.approx(busy[1], rel=0.01)


def test_pruning_pays_for_a_shorter_pipeline_and_a_shorter_all_reduce() -> None:
    tight = replace(WORKLOAD, cluster=replace(CLUSTER, memory=6e7))
    dense = search(tight, best=1)[0]
    sparse = search(replace(tight, storage=SPARSE, pruning_ratio=0.9, overhead=0.05), best=1)[0]
    assert sparse.choice.g_inter < dense.choice.g_inter
    same = evaluate(replace(WORKLOAD, storage=SPARSE, pruning_ratio=0.9), Choice(4, 1, 4))
    assert same.all_reduce_seconds < 0.2 * evaluate(WORKLOAD, Choice(4, 1, 4)).all_reduce_seconds


def test_nothing_fits() -> None:
    tight = replace(WORKLOAD, cluster=replace(CLUSTER, memory=1e6))
    with pytest.raises(ValueError, match=r"a device has 0\.001 GB, .*g_inter=8, .*needs 0\.0"):
        search(tight)


def test_a_batch_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"batch of 3 samples .* replicas of 16 devices"):
        search(replace(WORKLOAD, batch=3, cluster=replace(CLUSTER, devices=16)))
    with pytest.raises(ValueError, match="not a whole number of micro-batches of 3"):
        evaluate(WORKLOAD, Choice(4, 3, 4))


def test_divided_optimizer_state_takes_memory_of_replicas() -> None:
    for g_inter in (1, 2, CLUSTER.devices):
        choice = Choice(g_inter, 1, g_inter)
        plain, divided = (
            evaluate(replace(WORKLOAD, shard_optimizer=divides), choice).memory
            for divides in (False, True)
        )
        assert (divided < plain) == (g_inter < CLUSTER.devices)


def test_ranks_with_the_same_experts_divide_their_state() -> None:
    experts = replace(MODEL, experts=8, top_k=2)
    choice = Choice(1, 1, 4, g_expert=2, g_tensor=2)  # of two replicas
    workload = replace(WORKLOAD, layers=experts.costs, batch=8, cluster=replace(CLUSTER, devices=4))
    for splits, sharing in ((False, 2), (True, 1)):
        plain, divided = (
            evaluate(replace(workload, shard_optimizer=d, splits_experts=splits), choice).memory
            for d in (False, True)
        )
        layers = experts.costs
        of_experts = sum(layers.expert_weights) / 2 / (2 if splits else 1)
        others = (sum(layers.weights) - sum(layers.expert_weights)) / 2 + layers.outside_weights
        saved = 8 * (others / 2 + of_experts * (1 - 1 / sharing))
        assert plain - divided == pytest.approx(saved)


def test_spread_experts_take_memory_and_all_reduce_of_a_share_and_messages() -> None:
    experts = replace(MODEL, experts=8, top_k=2)
    workload = replace(WORKLOAD, layers=experts.costs, g_expert=(1, 2, 4))
    plans = [evaluate(workload, Choice(2, 1, 4, g_expert)) for g_expert in (1, 2)]
    whole, spread = plans
    weights = 4 * experts.expert_weights  # of a stage
    assert whole.memory - spread.memory == pytest.approx(16 * weights / 2)
    assert spread.all_reduce_seconds < whole.all_reduce_seconds
    assert spread.message_seconds > whole.message_seconds
    assert spread.simulation.makespan > 0
    assert {plan.choice.g_expert for plan in search(workload, 80)} == {1, 2, 4}


def test_ranks_that_share_layers_divide_work_and_memory_and_all_reduce_results() -> None:
    workload = replace(WORKLOAD, batch=32, g_tensor=(1, 2, 4))
    alone, shared = (evaluate(workload, Choice(2, 1, 4, g_tensor=each)) for each in (1, 2))
    assert (alone.g_data, shared.g_data) == (4, 2)
    block = 4 * MODEL.layer_weights  # of a stage
    saved = 4 * 4 * MODEL.split_activation_bytes
    assert alone.memory - shared.memory == pytest.approx((16 * block + saved) / 2)
    # A replica has half of the work a micro-batch, and twice as many of these.
    busy = [plan.simulation.busy[0] for plan in (alone, shared)]
    in_collectives = busy[1] - busy[0]
    times = 2 * 16 * 4 * 2  # passes, micro-batches, blocks, twice in each
    assert in_collectives == pytest.approx(times * (MODEL.message_bytes / 1e10 + 2 * 1e-6))
    assert shared.message_seconds > alone.message_seconds
    assert {plan.choice.g_tensor for plan in search(workload, 200)} == {1, 2, 4}


def test_recomputation_exchanges_nothing_twice() -> None:
    experts = replace(MODEL, experts=8, top_k=2)
    workload = replace(WORKLOAD, layers=experts.costs)
    choice = Choice(2, 1, 8, 2, 2)
    exchanged = [
        evaluate(replace(workload, recompute=each), choice).message_seconds
        for each in (False, True)
    ]
    assert exchanged[0] == exchanged[1]
