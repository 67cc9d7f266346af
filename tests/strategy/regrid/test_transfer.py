from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.pipeline.shard.sharding import ReshardedTensor
from lightning_axosparse.strategy.regrid.transfer import route


@st.composite
def moves(draw: st.DrawFn) -> tuple[ReshardedTensor, list[tuple[Grid, Grid]]]:
    """A tensor, and the old and new grid as each rank sees them."""
    new = draw(st.integers(1, 4))
    old = new * draw(st.integers(1, 3))
    world = old * draw(st.integers(1, 3))
    before = draw(st.frozensets(st.integers(0, old - 1), min_size=1))
    after = draw(st.frozensets(st.integers(0, new - 1), min_size=1))
    grids = [Grid(world, old, rank) for rank in range(world)]
    tensor = nn.Parameter()
    return ReshardedTensor("x", tensor, before, after), [
        (grid, grid.shortened(new)) for grid in grids
    ]


@given(moves())
def test_every_rank_that_needs_a_tensor_is_sent_it_once_unless_it_has_it(
    case: tuple[ReshardedTensor, list[tuple[Grid, Grid]]],
) -> None:
    moved, grids = case
    routes = [route(moved, old, new) for old, new in grids]
    for rank, (old, new) in enumerate(grids):
        has, needs = old.stage in moved.before, new.stage in moved.after
        assert (rank in routes[rank].destinations) == (needs and not has)
        assert routes[rank].source // old.g_inter == old.replica
        assert routes[routes[rank].source] == routes[rank]
        assert grids[routes[rank].source][0].stage in moved.before
