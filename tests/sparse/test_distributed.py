"""DistributedDataParallel reduces the unpruned entries, wrapped before the swap or after it.

One of the layers is an embedding that had sparse gradients while it was dense.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from tests.sparse.masking import apply_masks, random_masks

RANKS, STEPS = 2, 3


def network(sparse=True):
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 8, sparse=sparse)
    return nn.Sequential(embedding, nn.Flatten(), nn.Tanh(), nn.Linear(24, 4)).double()


def masks():
    torch.manual_seed(1)
    return random_masks(network(), 0.4)


def batch(step, rank):
    torch.manual_seed(10 * step + rank)
    return torch.randint(9, (5, 3))


def train(model, inputs_of, masks=None):
    """The weights after some steps of SGD, dense; with ``masks`` that of masked dense training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        apply_masks(model, masks or {})
        model(inputs_of(step)).square().mean().backward()
        optimizer.step()
    apply_masks(model, masks or {})
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def on_a_rank(folder):
    from mpi4py import MPI

    from lightning_axosparse import densify, sparsify

    rank = MPI.COMM_WORLD.rank
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )

    def shard(step):
        return batch(step, rank)

    inner = network()
    sparsify(inner, masks())
    after = train(DistributedDataParallel(inner), shard)
    before = DistributedDataParallel(network())
    before(shard(0)).sum().backward()
    sparsify(before, {f"module.{name}": mask for name, mask in masks().items()})
    results = after, train(before, shard)
    densify(before)
    before.zero_grad()
    before(shard(0)).sum().backward()
    return *results, {name: p.grad.to_dense() for name, p in before.module.named_parameters()}


def test_wrapped_before_and_after_the_swap(tmp_path: Path):
    inputs = [torch.cat([batch(step, rank) for rank in range(RANKS)]) for step in range(STEPS)]
    expected = train(network(sparse=False), inputs.__getitem__, masks())
    results = run_ranks(RANKS, on_a_rank, tmp_path)
    for after, before, _ in results:
        torch.testing.assert_close(after, expected)
        torch.testing.assert_close(before, expected)
    torch.testing.assert_close(results[0][2], results[1][2])
