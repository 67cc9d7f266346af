from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)


KINDS = ("dense", "unused layer", "sparse")


def reduce_on_ranks() -> dict[str, Any]:
    """All kinds in one job, as starting ranks takes longer than reducing."""
    from lightning_axosparse.distributed.mpi import node_collectives

    smallest, found = node_collectives.MIN_BYTES, {}
    for kind in KINDS:
        node_collectives.MIN_BYTES = smallest if kind == "unused layer" else 1
        found[kind] = reduce_kind(kind)
    return found


def reduce_kind(kind: str) -> dict[str, Any]:
    import torch.distributed as dist

    from lightning_axosparse.distributed import gradient_reducer
    from lightning_axosparse.distributed.mpi.process_group import init_process_group
    from lightning_axosparse.sparse import sparsify

    init_process_group("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    kept = {}
    if kind == "sparse":
        masks = {f"layers.{i}.weight": torch.rand(64, 64) > 0.9 for i in range(4)}
        sparsify(net, masks)
        kept = {name: int(mask.sum()) for name, mask in masks.items()}
    gradient_reducer.BUCKET_BYTES = 20_000
    group = gradient_reducer.ReductionGroup(dist.group.WORLD, list(net.parameters()))
    reducer = gradient_reducer.GradientReducer([group], size)
    early_bytes = 0
    kept_gradients, places = [], set()
    for step in range(4):
        if step == 1:
            kept_gradients = [(p.grad, p.grad.clone()) for p in net.layers.parameters()]
        net.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        reducer.prepare()
        for layer in net.layers[: 3 if kind == "unused layer" and rank else 4]:
            x = torch.tanh(layer(x))
        x.sum().backward()
        early_bytes = reducer.reduced_bytes
        reducer.finish()
        places.add(net.layers[0].bias.grad.untyped_storage().data_ptr())
    return {
        "kept gradients": all(torch.equal(now, then) for now, then in kept_gradients),
        "places": len(places),
        "gradients": {n: p.grad for n, p in net.named_parameters()},
        "bytes": reducer.reduced_bytes,
        "early": early_bytes,
        "kept": kept,
    }


def expected(ranks: int, skipping: bool) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    net = Net()
    for rank in range(ranks):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(30 + rank))
        for layer in net.layers[: 3 if skipping and rank else 4]:
            x = torch.tanh(layer(x))
        (x.sum() / ranks).backward()
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """What each kind gave, on each of two ranks."""
    return run_ranks(2, reduce_on_ranks)


@pytest.mark.parametrize("kind", ["dense", "unused layer"])
def test_gradients_are_averaged_and_unused_ones_stay_none(kind: str, runs: Any) -> None:
    results = [run[kind] for run in runs]
    for name, gradient in expected(2, kind == "unused layer").items():
        for result in results:
            got = result["gradients"][name]
            assert (got is None) == (gradient is None), name
            if gradient is not None:
                assert torch.allclose(got, gradient, atol=1e-7), name
    for result in results:
        assert result["kept gradients"]
        assert result["places"] == 2  # one was kept


def test_a_sparse_parameter_reduces_its_kept_values_only(runs: Any) -> None:
    dense, sparse = runs[0]["dense"], runs[0]["sparse"]
    rest = 4 * 64 + 3 * 3 + 3
    assert dense["bytes"] == 4 * (4 * 64 * 64 + rest)
    assert sparse["bytes"] == 4 * (sum(sparse["kept"].values()) + rest)
    for name, kept in sparse["kept"].items():
        assert sparse["gradients"][name].shape == (kept,)


def test_a_bucket_with_missing_gradients_delays_the_next_ones(runs: Any) -> None:
    # The first bucket has parameters without a gradient, so the others wait for it.
    assert runs[0]["unused layer"]["early"] == 0


def test_buckets_are_reduced_as_soon_as_their_gradients_are_final() -> None:
    weight = 4 * 64 * 64
    (started,) = run_ranks(1, overlap)
    assert started[:4] == [weight, 2 * weight, 3 * weight, 4 * weight]
    assert started[4:] == [0, 0, 0, 0, weight, weight, 4 * weight]


def overlap() -> list[int]:
    """What is being reduced after each gradient; then where gradients are deferred.

    There, after each of them, after each of two became final, and after all.
    """
    import torch.distributed as dist

    from lightning_axosparse.distributed import gradient_reducer
    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    weights = list(layers.parameters())
    gradient_reducer.BUCKET_BYTES = 1
    group = gradient_reducer.ReductionGroup(dist.group.WORLD, weights)
    reducer = gradient_reducer.GradientReducer([group], 1)
    reducer.prepare()
    started: list[int] = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: started.append(reducer.reduced_bytes))
    layers(torch.randn(8, 64)).sum().backward()
    reducer.finish()
    layers.zero_grad()
    reducer.prepare(deferred=set(weights))
    layers(torch.randn(8, 64)).sum().backward()
    for place in (3, 1):  # That of the third layer is not final, and all ranks keep one order.
        reducer.mark_final(weights[place])
        started.append(reducer.reduced_bytes)
    reducer.finish()
    return [*started, reducer.reduced_bytes]
