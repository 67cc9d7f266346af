"""Parts of a parameter, of its gradient and its state come from all of it, and give it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_axosparse.distributed.mpi.process_group import init_process_group
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.module.parameters import owned_parameters
from lightning_axosparse.strategy.weight_parts import SplitParameter
from tests.ranks import run_ranks

HALF = torch.arange(24).view(4, 6) % 2 == 0
ONE_SIDE = torch.arange(24).view(4, 6) < 12
MASKS = {"dense": None, "half": HALF, "none on one rank": ONE_SIDE}


def stepped(mask: Tensor | None) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    if mask is not None:
        sparsify(layer, {"weight": mask}, optimizer, compute="samo")
    return layer, optimizer


def seen(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What there is of the weight, dense."""
    entry = owned_parameters(layer)[0]
    parameter, layout = entry.parameter, entry.layout
    tensors = {"values": parameter.detach(), "gradient": parameter.grad}
    tensors.update({k: v for k, v in optimizer.state[parameter].items() if v.dim()})
    return {k: v if layout is None else layout.densify(v) for k, v in tensors.items()}


def on_rank() -> dict[str, Any]:
    init_process_group("cpu")
    found = {}
    for name, mask in MASKS.items():
        for dimension in (0, 1):
            layer, optimizer = stepped(mask)
            entry = owned_parameters(layer)[0]
            assert dist.group.WORLD is not None
            split = SplitParameter(
                entry, dimension, [entry.shape[dimension] // 2] * 2, dist.group.WORLD
            )
            before = seen(layer, optimizer)
            split.keep_part([optimizer])
            part = seen(layer, optimizer)
            shape = tuple(entry.parameter.shape)
            values, state, layout = split.gather_stored(optimizer.state[entry.parameter])
            read = {"values": values, **{k: v for k, v in state.items() if v.dim()}}
            read = {k: v if layout is None else layout.densify(v) for k, v in read.items()}
            split.gather([optimizer])
            form = entry.form
            after = seen(layer, optimizer)
            found[name, dimension] = before, part, shape, read, after, form
    return found


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("name", MASKS)
def test_parts_are_those_of_the_whole_and_give_it_back(
    name: str, dimension: int, ranks: list[dict[Any, Any]]
) -> None:
    mask = MASKS[name]
    for rank, found in enumerate(ranks):
        before, part, shape, read, after, form = found[name, dimension]
        for key, whole in before.items():
            assert torch.equal(part[key], whole.chunk(2, dimension)[rank]), key
            assert torch.equal(after[key], whole), key
            assert key == "gradient" or torch.equal(read[key], whole), key
        if mask is not None:
            assert shape == (int(mask.chunk(2, dimension)[rank].sum()),)
            assert form.copy is not None


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(2, on_rank)
