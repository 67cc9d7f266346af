from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.planning.cost import (
    DENSE,
    SPARSE,
    Cluster,
    Storage,
    Transformer,
)
from lightning_axosparse.planning.simulate import Wire
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.backend import Compute
from lightning_axosparse.sparse.module.parameters import state_bytes

SIZE, LAYERS = 512, 2
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def measured(precision: str, compute: Compute | None, ratio: float) -> int:
    """Bytes of state of some layers with AdamW, after a step and a further backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    inputs = torch.randn(4, SIZE)
    if precision == "bf16-true":
        model, inputs = model.bfloat16(), inputs.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    if compute is not None:
        masks = {}
        for name, parameter in model.named_parameters():
            mask = torch.zeros(parameter.numel(), dtype=torch.bool)
            mask[torch.randperm(mask.numel())[round(ratio * mask.numel()) :]] = True
            masks[name] = mask.view(parameter.shape)
        sparsify(model, masks, optimizer, compute)
    for _ in range(2):
        dtype = AUTOCAST.get(precision, torch.bfloat16)
        with torch.autocast("cpu", dtype, enabled=precision in AUTOCAST):
            output = model(inputs)
        output.float().square().sum().backward()
        optimizer.step()
    return state_bytes(model, optimizer).total


def table(precision: str, compute: Compute | None) -> Storage:
    """The row of the module's docstring."""
    if compute is None:
        return Storage(per_weight=8 if precision == "bf16-true" else 16, per_unpruned=0, gradient=4)
    copy = {"auto": 0, "samo": 4 if precision == "32-true" else 2}[compute]
    return Storage(SPARSE.per_weight + copy, SPARSE.per_unpruned, SPARSE.gradient)


def predicted(storage: Storage, ratio: float) -> float:
    steps = LAYERS * 4  # AdamW counts steps in a float of each parameter
    return storage.state_bytes(LAYERS * SIZE**2, ratio) + steps


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("compute", [None, "auto", "samo"])
def test_the_table_gives_the_measured_bytes(precision: str, compute: Compute | None) -> None:
    found = measured(precision, compute, 0.9)
    assert found == pytest.approx(predicted(table(precision, compute), 0.9), rel=1e-3)


@pytest.mark.parametrize("ratio", [0.5, 0.8, 0.95])
def test_storage_of_plans_takes_the_measured_bytes(ratio: float) -> None:
    assert measured("32-true", None, 0.0) == predicted(DENSE, 0.0)
    assert measured("32-true", "sparse", ratio) == pytest.approx(predicted(SPARSE, ratio), rel=1e-3)


@given(ratio=st.floats(0, 0.999))
def test_sparse_storage_pays_where_17_bytes_per_kept_weight_are_less_than_16_per_weight(
    ratio: float,
) -> None:
    assert (SPARSE.state_bytes(1e6, ratio) < DENSE.state_bytes(1e6, 0.0)) == (
        SPARSE.per_weight + 17 * (1 - ratio) < 16
    )


def test_the_formula_that_samo_published() -> None:
    published = Storage(per_weight=2, per_unpruned=24, gradient=2)
    assert published.state_bytes(1.0, 0.9) == pytest.approx(24 * 0.1 + 2)
    assert published.reduced_bytes(1.0, 0.9) == pytest.approx(0.2)


def test_fixed_bytes_count_once() -> None:
    buffered = Storage(per_weight=4, per_unpruned=0, gradient=2, fixed=64.0)
    assert buffered.state_bytes(10, 0.0) == 104


@given(replicas=st.integers(1, 64), ratio=st.floats(0, 0.99))
def test_replicas_divide_the_moments_alone(replicas: int, ratio: float) -> None:
    for storage in (DENSE, SPARSE):
        whole, part = (
            each.state_bytes(1e6, ratio) for each in (storage, storage.sharded(replicas))
        )
        moments = 8e6 * (1 - ratio)
        assert part == pytest.approx(whole - moments + moments / replicas)
        assert storage.sharded(replicas).reduced_bytes(1, ratio) == storage.reduced_bytes(1, ratio)


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
