"""The process groups of several grids and the collectives over them, on four real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import (
    ProcessGroups,
    all_gather,
    all_sum,
    broadcast_from_first,
    gather,
)
from tests.ranks import run_ranks

GROUPS = ("inter", "data", "same_loader", "logged")
ALL, PAIRS, STRIDED = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]

# (g_inter, replicas_per_batch): the parts of more than one rank, for each of GROUPS
PARTS: dict[tuple[int, int], tuple[list[list[int]], ...]] = {
    (1, 1): ([], ALL, [], ALL),
    (2, 1): (PAIRS, STRIDED, PAIRS, STRIDED),
    (4, 1): (ALL, [], ALL, []),
    (1, 2): ([], ALL, PAIRS, ALL),
    (2, 2): (PAIRS, STRIDED, ALL, STRIDED),
    (1, 4): ([], ALL, ALL, ALL),
}


def tensors() -> list[torch.Tensor]:
    """Tensors of many kinds, alike on all ranks."""
    numbers, named = torch.arange(6.0).view(2, 3), torch.zeros(2)
    named.unit = "metres"
    return [
        *(numbers.to(dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool)),
        *(numbers.t(), numbers[:, 1], numbers[0, 0], numbers[:0], torch.complex(numbers, -numbers)),
        *(torch.complex(numbers, numbers).conj(), numbers.to_sparse()),
        *(numbers.clone().requires_grad_(), torch.nn.Parameter(numbers), named),
    ]


def form_groups() -> dict[Any, Any]:
    """What a rank finds in every grid, one after the other in one job."""
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    found = {shape: of_grid(*shape) for shape in PARTS}
    first, second = (ProcessGroups(Grid(4, 2, dist.get_rank())) for _ in range(2))
    found["kept"] = first.inter is second.inter and first.logged is second.logged
    dist.destroy_process_group()
    init_process_group("cpu")
    found["after another start"] = of_grid(2, 1)
    return found


def of_grid(g_inter: int, replicas_per_batch: int) -> dict[str, Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    grid = Grid(4, g_inter, rank, replicas_per_batch)
    groups = ProcessGroups(grid)
    last = g_inter - 1
    groups.create_shared({frozenset({0, last}), frozenset({0})})

    def members(group: Any) -> list[int] | None:
        return None if group is None else sorted(dist.get_process_group_ranks(group))

    ends = frozenset({0, last})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
    total = all_sum(torch.tensor([rank]), groups.same_loader)
    return {
        "members": {name: members(getattr(groups, name)) for name in GROUPS},
        "everybody": (members(groups.world), members(groups.loop_ends)),
        "apart": groups.loop_ends is not groups.world
        and (groups.logged is None or groups.logged is not groups.data),
        "holding": members(groups.shared_by_stages(ends)) if grid.stage in ends else None,
        "along pipeline": groups.broadcast_along_pipeline(rank, last),
        "in replica": groups.broadcast_in_replica(rank, last),
        "gathered": gather(rank, groups.data),
        "all gathered": all_gather(rank, groups.inter),
        "from first": broadcast_from_first(rank, groups.data),
        "tensors": broadcast_from_first(tensors(), groups.world),
        "several shapes": [t.tolist() for t in broadcast_from_first(nested, groups.world).unbind()],
        "sum": total.tolist(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(4, form_groups)


def part_of(rank: int, parts: list[list[int]]) -> list[int] | None:
    return next((part for part in parts if rank in part), None)


@pytest.mark.parametrize("shape", PARTS)
def test_each_rank_is_in_the_groups_of_its_grid(shape: tuple[int, int], ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        for name, parts in zip(GROUPS, PARTS[shape], strict=True):
            assert found[shape]["members"][name] == part_of(rank, parts), name
        assert found[shape]["everybody"] == ([0, 1, 2, 3], [0, 1, 2, 3])
        assert found[shape]["apart"]


def test_parameters_of_the_first_and_the_last_stage_are_held_by_all_their_replicas(
    ranks: Any,
) -> None:
    assert [found[4, 1]["holding"] for found in ranks] == [[0, 3], None, None, [0, 3]]
    assert [found[2, 1]["holding"] for found in ranks] == [[0, 1, 2, 3]] * 4
    assert [found[1, 1]["holding"] for found in ranks] == [[0, 1, 2, 3]] * 4


def test_collectives_reach_the_ranks_of_their_group_alone(ranks: Any) -> None:
    def of(shape: tuple[int, int], name: str) -> list[Any]:
        return [found[shape][name] for found in ranks]

    for name in ("along pipeline", "in replica"):
        assert of((2, 1), name) == of((2, 2), name) == [0, 0, 2, 2]
        assert of((4, 1), name) == [0, 0, 0, 0]
        assert of((1, 1), name) == of((1, 2), name) == [0, 1, 2, 3]

    assert of((4, 1), "gathered") == [[0], [1], [2], [3]]
    assert of((2, 2), "gathered") == [[0, 2], [1, 3], [], []]
    assert of((1, 2), "gathered") == [[0, 1, 2, 3], [], [], []]

    assert of((2, 1), "all gathered") == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert of((2, 1), "from first") == [0, 1, 0, 1]
    assert of((2, 1), "sum") == [[1], [1], [5], [5]]
    assert of((1, 1), "sum") == [[0], [1], [2], [3]]


def test_tensors_arrive_as_they_are(ranks: Any) -> None:
    for found in ranks:
        for arrived, sent in zip(found[1, 1]["tensors"], tensors(), strict=True):
            assert type(arrived) is type(sent)
            assert arrived.requires_grad == sent.requires_grad
            assert vars(arrived) == vars(sent)
            torch.testing.assert_close(arrived, sent, rtol=0, atol=0)
        assert found[1, 1]["several shapes"] == [[1, 1], [1]]


def test_groups_are_kept_as_long_as_the_world_that_they_are_part_of(ranks: Any) -> None:
    assert all(found["kept"] for found in ranks)
    for found in ranks:
        both = [{**each, "tensors": None} for each in (found["after another start"], found[2, 1])]
        assert both[0] == both[1]


def test_a_process_alone_needs_no_process_group() -> None:
    groups = ProcessGroups(Grid(1, 1))
    assert {getattr(groups, name) for name in (*GROUPS, "world", "loop_ends")} == {None}
    assert groups.shared_by_stages(frozenset({0})) is None
    for stage in (0, 3):  # with the loopback transport it runs all stages
        assert groups.broadcast_along_pipeline("value", stage) == "value"
        assert groups.broadcast_in_replica("value", stage) == "value"
    assert gather("value", None) == all_gather("value", None) == ["value"]
    assert broadcast_from_first("value", None) == "value"
    assert all_sum(torch.tensor([3.0]), None).tolist() == [3.0]
