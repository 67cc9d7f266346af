from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_axosparse.sparse import layout as layout_module
from lightning_axosparse.sparse import torch_functions
from lightning_axosparse.sparse.formats import layout_of
from lightning_axosparse.sparse.layout import Layout
from lightning_axosparse.sparse.materialize import DenseForm

ROWS, COLUMNS = 300, 40


def read(values, layout):
    return torch_functions.read_weight(values, layout, DenseForm(values.dtype))


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setitem(layout_module.TILE_ENTRIES, "cpu", 1)
    monkeypatch.setattr(torch_functions, "MIN_ENTRIES", 0)
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
    found = [F.embedding(tokens, w, padding) for w in (read(values, layout), dense)]
    assert torch.equal(*found)
    for rows in found:
        rows.pow(2).sum().backward()
    torch.testing.assert_close(values.grad, dense.grad[mask])


def test_tiles_without_a_token_are_not_made(pair, monkeypatch):
    values, layout, _, _ = pair
    visited = []
    monkeypatch.setattr(
        Layout, "densify_tile", lambda _, tile, values, out: visited.append(tile) or out.zero_()
    )
    F.embedding(torch.tensor([ROWS - 1]), read(values, layout))
    assert visited == [layout.tiles[-1]]


def test_double_backward(pair):
    values, layout, mask, dense = pair
    tokens = torch.randint(ROWS, (9,))
    for weight, leaf in ((read(values, layout), values), (dense, dense)):
        (gradient,) = torch.autograd.grad(
            F.embedding(tokens, weight).pow(3).sum(), leaf, create_graph=True
        )
        gradient.square().sum().backward()
    torch.testing.assert_close(values.grad, dense.grad[mask])


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_other_settings_use_the_dense_weight(pair, settings):
    values, layout, _, dense = pair
    tokens = torch.tensor([3, 3, 200])
    with torch.no_grad():
        weights = read(values.detach(), layout), dense.detach()
    torch.testing.assert_close(*[F.embedding(tokens, w, **settings) for w in weights])


def test_an_index_out_of_range_raises_torchs_error(pair):
    values, layout, _, _ = pair
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(torch.tensor([ROWS]), read(values, layout))
