from dataclasses import replace

import pytest
from torch import nn

from lightning_axosparse.planning.cost import Cluster, Transformer, layer_costs
from lightning_axosparse.planning.simulate import Wire

GPT = Transformer(layers=24, width=2048, heads=16, sequence=1024, vocabulary=50257)
NODE, NETWORK = Wire(1e-6, 50e9), Wire(1e-5, 12e9)
CLUSTER = Cluster(
    devices=24,
    devices_per_node=6,
    memory=16e9,
    speed=60e12,
    memory_bandwidth=900e9,
    node=NODE,
    network=NETWORK,
)


def test_a_gpt_has_the_size_it_is_named_by() -> None:
    assert GPT.weights == pytest.approx(1.3e9, rel=0.02)


def test_flops_are_those_of_narayanan_et_al() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh) with recomputation; SC 2021, equation 2."""
    h, s, v, layers = GPT.width, GPT.sequence, GPT.vocabulary, GPT.layers
    recomputed = 4 * layers * GPT.layer_flops + 3 * GPT.head_flops
    formula = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert recomputed == pytest.approx(formula)


def test_activations_are_those_of_korthikanti_et_al() -> None:
    h, s, a = GPT.width, GPT.sequence, GPT.heads
    assert GPT.layer_activation_bytes == pytest.approx(s * h * (34 + 5 * a * s / h))
    assert replace(GPT, itemsize=4).layer_activation_bytes == 2 * GPT.layer_activation_bytes


@pytest.mark.parametrize(
    ("g_inter", "network"),
    [(1, []), (3, []), (6, []), (12, [5]), (8, [1, 3, 5]), (24, [5, 11, 17])],
)
def test_a_boundary_crosses_the_network_where_any_replica_crosses_nodes(
    g_inter: int, network: list[int]
) -> None:
    wires = CLUSTER.wires(g_inter)
    assert len(wires) == g_inter - 1
    assert [i for i, wire in enumerate(wires) if wire is NETWORK] == network


def test_rings_of_a_node_share_its_network() -> None:
    assert CLUSTER.ring(1).bandwidth == NETWORK.bandwidth
    assert CLUSTER.ring(3).bandwidth == NETWORK.bandwidth / 3
    assert CLUSTER.ring(12).bandwidth == NETWORK.bandwidth / 6
    assert replace(CLUSTER, devices=6).ring(3) is NODE


def test_every_stage_has_the_parameters_outside_the_layers() -> None:
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    module = nn.ModuleDict({"layers": layers, "head": nn.Linear(100, 10, bias=False)})
    costs = layer_costs(module, list(layers), None)
    assert costs.outside_weights == 1000
    assert costs.weights == (10_000,) * 8
