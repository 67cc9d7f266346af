import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.grid import Grid, divisors


@given(g_inter=st.integers(1, 8), g_data=st.integers(1, 8))
def test_a_pipeline_is_a_run_of_consecutive_ranks(g_inter: int, g_data: int) -> None:
    world = g_inter * g_data
    grids = [Grid(world, g_inter, rank) for rank in range(world)]
    assert [(grid.replica, grid.stage) for grid in grids] == [
        (replica, stage) for replica in range(g_data) for stage in range(g_inter)
    ]
    for grid in grids:
        assert grid.g_data == g_data
        assert grid.pipeline[grid.stage] == grid.rank
        assert grid.rank in grid.ranks_holding(frozenset([grid.stage]))[0]
        assert len(grid.ranks_holding(frozenset([0, g_inter - 1]))[0]) == g_data * min(2, g_inter)


@pytest.mark.parametrize("g_inter", [0, 3, 8, -2])
def test_stages_that_do_not_divide_the_world_raise(g_inter: int) -> None:
    with pytest.raises(MisconfigurationException, match=rf"g_inter={g_inter} .* 4 rank.*1, 2, 4"):
        Grid(4, g_inter)


@given(g_inter=st.integers(1, 4), joined=st.integers(1, 3), batches=st.integers(1, 3))
def test_shorter_pipelines_share_the_batches_of_the_long_one(
    g_inter: int, joined: int, batches: int
) -> None:
    world = g_inter * joined * batches
    old = [Grid(world, g_inter * joined, rank) for rank in range(world)]
    for rank, new in enumerate(grid.shortened(g_inter) for grid in old):
        assert (new.g_inter, new.replicas_per_batch, new.data_size) == (g_inter, joined, batches)
        assert new.data_rank == old[rank].replica
        assert list(new.same_batch_ranks) == old[rank].pipeline
        assert new.batch_replicas(new.stage)[new.part_of_batch] == rank
        assert old[rank].batch_replicas(old[rank].stage) == [rank]


def test_divisors_are_found_at_once_for_large_numbers():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(2**31 - 1) == [1, 2**31 - 1]


@given(g_inter=st.integers(1, 3), g_tensor=st.integers(1, 3), g_data=st.integers(1, 3))
def test_ranks_that_share_layers_have_one_stage_and_one_replica(
    g_inter: int, g_tensor: int, g_data: int
) -> None:
    world = g_inter * g_tensor * g_data
    grids = [Grid(world, g_inter, rank, g_tensor=g_tensor) for rank in range(world)]
    assert [(grid.replica, grid.tensor_rank, grid.stage) for grid in grids] == [
        (replica, tensor_rank, stage)
        for replica in range(g_data)
        for tensor_rank in range(g_tensor)
        for stage in range(g_inter)
    ]
    for partition, same in (
        ("tensor_ranks", ("replica", "stage")),
        ("stage_ranks", ("tensor_rank", "stage")),
        ("replica_ranks", ("replica",)),
        ("batch_ranks", ("data_rank",)),
    ):
        parts = getattr(grids[0], partition)
        assert sorted(rank for part in parts for rank in part) == list(range(world))
        for part in parts:
            assert len({tuple(getattr(grids[rank], n) for n in same) for rank in part}) == 1
            assert len(part) == world // len(parts)
    for grid in grids:
        assert grid.data_size == g_data
        assert grid.rank in grid.ranks_holding(frozenset([grid.stage]))[grid.tensor_rank]
        assert grids[grid.batch_replicas(grid.stage)[0]].tensor_rank == 0


def test_a_tensor_group_that_does_not_divide_the_world_raises():
    with pytest.raises(MisconfigurationException, match=r"g_tensor=3 .* 4 rank.*\[1, 2\]"):
        Grid(4, 2, g_tensor=3)


@given(
    g_inter=st.integers(1, 2),
    g_tensor=st.integers(1, 2),
    g_expert=st.integers(1, 3),
    copies=st.integers(1, 2),
)
def test_ranks_with_experts_of_a_stage_are_in_consecutive_replicas(
    g_inter: int, g_tensor: int, g_expert: int, copies: int
) -> None:
    world = g_inter * g_tensor * g_expert * copies
    grids = [Grid(world, g_inter, r, g_tensor=g_tensor, g_expert=g_expert) for r in range(world)]

    def ranks_with(*names: str) -> set[tuple[int, ...]]:
        """The ranks for which these attributes are equal, for each value that they have."""
        found: dict[tuple[int, ...], list[int]] = {}
        for grid in grids:
            copy = grid.replica // g_expert
            values = tuple(copy if n == "copy" else getattr(grid, n) for n in names)
            found.setdefault(values, []).append(grid.rank)
        return {*map(tuple, found.values())}

    grid = grids[0]
    assert {*map(tuple, grid.whole_ranks)} == ranks_with("copy") == ranks_with("evaluation_group")
    assert {*map(tuple, grid.ordered_ranks)} == ranks_with("copy", "stage")
    assert {*map(tuple, grid.expert_ranks)} == ranks_with("copy", "stage", "tensor_rank")
    same = ranks_with("expert_rank", "stage")
    assert {*map(tuple, grid.same_expert_ranks)} == same
    assert all(
        [grids[r].expert_rank for r in ranks] == [*range(g_expert)] for ranks in grid.expert_ranks
    )


def test_ranks_with_experts_divide_the_replicas() -> None:
    with pytest.raises(MisconfigurationException, match=r"g_expert=2 .* g_data=3 .*\[1, 3\]"):
        Grid(6, 2, g_expert=2)
