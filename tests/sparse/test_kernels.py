from __future__ import annotations

import numba
import torch

from lightning_axosparse.sparse.kernels import reference, vectors
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.trace import clock


def test_kernels_account_for_their_time():
    clock.totals.clear()
    layout = Layout.from_mask(torch.eye(2, dtype=torch.bool))
    [tile] = layout.tiles
    dense, values = torch.empty(4), torch.empty(2)
    layout.densify_tile(tile, torch.tensor([1.0, 2.0]), dense)
    assert dense.tolist() == [1, 0, 0, 2]
    assert clock.totals["densify"] > 0
    assert clock.totals["compress"] == 0
    layout.compress_tile(tile, dense, values)
    assert values.tolist() == [1, 2]
    assert clock.totals["compress"] > 0


def test_scatter_and_gather_are_differentiable():
    indices = torch.tensor([1, 2], dtype=torch.int32)
    values = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda v: reference.gather(reference.scatter(v, indices, (2, 2)).square(), indices), values
    )


def test_compilation_is_said_once_and_what_is_loaded_is_not(monkeypatch):
    said = []
    monkeypatch.setattr(vectors, "rank_zero_info", said.append)

    @numba.njit
    def one(x):
        return x + 1

    @numba.njit
    def two(x):
        return one(x) + 1

    with vectors.compilation_said():
        assert two(1) == 3
        assert two(1.0) == 3.0
    assert said == ["Compiling loops for sparse weights: only the first time on a machine."]
    with vectors.compilation_said():
        assert two(1) == 3  # compiled before
    assert len(said) == 1
