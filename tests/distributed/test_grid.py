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
        (replica, stage) for replica in range(g_data) for stage in reversed(range(g_inter))
    ]
    for grid in grids:
        assert grid.g_data == g_data
        assert grid.pipeline[grid.stage] == grid.first_rank(grid.stage) == grid.rank
        group = grid.ranks_by(lambda g: g.pipeline_index)[grid.pipeline_index]
        assert grid.pipeline == group[::-1]
        assert [len(ranks) for ranks in grid.ranks_by(lambda g: "all", {0, g_inter - 1})] == [
            g_data * min(2, g_inter)
        ]


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
        assert new.same_batch_ranks == sorted(old[rank].pipeline)
        assert new.same_batch_ranks == new.ranks_by(lambda g: g.data_rank)[new.data_rank]
        assert new.part_of_batch == new.replica - new.data_rank * joined
        assert old[rank].part_of_batch == 0


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
        for stage in reversed(range(g_inter))
    ]
    for grid in grids:
        assert grid.data_size == g_data
        held = grid.ranks_by(lambda g: g.tensor_rank, {grid.stage})
        assert grid.rank in held[grid.tensor_rank]
        first = grids[grid.first_rank(grid.stage)]
        assert (first.replica, first.tensor_rank, first.stage) == (grid.replica, 0, grid.stage)


def test_a_tensor_group_that_does_not_divide_the_world_raises():
    with pytest.raises(MisconfigurationException, match=r"tensor_parallel=3 .* 4 rank.*\[1, 2\]"):
        Grid(4, 2, g_tensor=3)


def test_ranks_are_grouped_by_what_they_have_in_common():
    grid = Grid(16, 2, rank=6, g_tensor=2, g_expert=2)
    assert (grid.replica, grid.copy_index, grid.expert_rank) == (1, 0, 1)
    assert grid.ranks_by(lambda g: g.copy_index) == [[*range(8)], [*range(8, 16)]]
    with_experts_of_a_stage = grid.ranks_by(lambda g: (g.copy_index, g.tensor_rank, g.stage), {0})
    assert with_experts_of_a_stage == [[1, 5], [3, 7], [9, 13], [11, 15]]
    same_experts = grid.ranks_by(lambda g: (g.expert_rank, g.stage))
    assert same_experts == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]


def test_ranks_with_experts_divide_the_replicas() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"expert_parallel=2 .* the 3 replicas.*\[1, 3\]"
    ):
        Grid(6, 2, g_expert=2)
