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
        assert grid.pipeline(grid.replica)[grid.stage] == grid.rank
        assert grid.rank in grid.ranks_holding(frozenset([grid.stage]))
        assert len(grid.ranks_holding(frozenset([0, g_inter - 1]))) == g_data * min(2, g_inter)


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
        assert list(new.same_batch_ranks) == old[rank].pipeline(old[rank].replica)
        assert new.batch_replicas(new.stage)[new.part_of_batch] == rank
        assert old[rank].batch_replicas(old[rank].stage) == [rank]


def test_divisors_are_found_at_once_for_large_numbers():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(2**31 - 1) == [1, 2**31 - 1]
