from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_axosparse.sparse import layout as layout_module
from lightning_axosparse.sparse import weight as weight_module
from lightning_axosparse.sparse.formats import layout_of
from lightning_axosparse.sparse.weight import sparse_weight

ROWS, COLUMNS = 300, 40


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setitem(layout_module.TILE_ENTRIES, "cpu", 1)
    monkeypatch.setattr(weight_module, "OWN_WAY_ENTRIES", 0)
    mask = torch.rand(ROWS, COLUMNS) < 0.3
    values = nn.Parameter(torch.randn(int(mask.sum())))
    dense = torch.zeros(mask.shape).masked_scatter(mask, values.detach()).requires_grad_()
    layout = layout_of(mask)
    assert len(layout.tiles) == 3
    return values, layout, mask, dense


@pytest.mark.parametrize("padding", [None, 7, -1])
@pytest.mark.parametrize("shape", [(), (50,), (4, 25), (0,)])
def test_rows_and_gradient(pair, shape, padding):
    values, layout, mask, dense = pair
    tokens = torch.randint(ROWS, shape)
    if tokens.dim() == 1:
        tokens[:20], tokens[20:24] = 7, ROWS - 1
    found = [F.embedding(tokens, w, padding) for w in (sparse_weight(values, layout), dense)]
    assert torch.equal(*found)
    for rows in found:
        rows.pow(2).sum().backward()
    torch.testing.assert_close(values.grad, dense.grad[mask])


def test_tiles_without_a_token_are_not_made(pair, monkeypatch):
    values, layout, _, _ = pair
    visited = []
    monkeypatch.setattr(
        "lightning_axosparse.sparse.lookup.kernels.densify",
        lambda layout, tile, values, out: visited.append(tile) or out.zero_(),
    )
    F.embedding(torch.tensor([ROWS - 1]), sparse_weight(values, layout))
    assert visited == [layout.tiles[-1]]


def test_double_backward(pair):
    values, layout, mask, dense = pair
    tokens = torch.randint(ROWS, (9,))
    for weight, leaf in ((sparse_weight(values, layout), values), (dense, dense)):
        (gradient,) = torch.autograd.grad(
            F.embedding(tokens, weight).pow(3).sum(), leaf, create_graph=True
        )
        gradient.square().sum().backward()
    torch.testing.assert_close(values.grad, dense.grad[mask])


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_what_has_no_way_of_its_own_still_works(pair, settings):
    values, layout, _, dense = pair
    tokens = torch.tensor([3, 3, 200])
    with torch.no_grad():
        weights = sparse_weight(values.detach(), layout), dense.detach()
    torch.testing.assert_close(*[F.embedding(tokens, w, **settings) for w in weights])


def test_an_index_out_of_range_is_refused_in_torchs_words(pair):
    values, layout, _, _ = pair
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(torch.tensor([ROWS]), sparse_weight(values, layout))
