from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.kernels import segments
from lightning_axosparse.sparse.ops import embedding, torch_functions
from lightning_axosparse.sparse.store import layout as layout_module
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm

ROWS, COLUMNS = 300, 40
WIDE = 300
"""Columns for which each row has segments of its own."""


def read(values, layout):
    return torch_functions.read_weight(values, layout, DenseForm(values.dtype))


@pytest.fixture(params=[COLUMNS, WIDE])
def pair(request, monkeypatch):
    monkeypatch.setitem(layout_module.TILE_ENTRIES, "cpu", 1)
    monkeypatch.setattr(torch_functions, "MIN_ENTRIES", 0)
    mask = torch.rand(ROWS, request.param) < 0.3
    mask[10:20] = False
    values = nn.Parameter(torch.randn(int(mask.sum())))
    dense = torch.zeros(mask.shape).masked_scatter(mask, values.detach()).requires_grad_()
    layout = layout_of(mask)
    assert len(layout.tiles) > 2
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


def test_a_conversion_loads_the_loops_that_layers_run():
    embedding.load_loops.cache_clear()
    layer = nn.Embedding(ROWS, WIDE)
    sparsify(layer, {"weight": torch.rand(ROWS, WIDE) < 0.3})
    assert embedding.load_loops.cache_info().currsize
    loaded = [len(loop.signatures) for loop in (segments._take_rows, segments._add_rows)]
    layer(torch.randint(ROWS, (2, 5))).sum().backward()
    assert [len(loop.signatures) for loop in (segments._take_rows, segments._add_rows)] == loaded


@pytest.mark.parametrize("pair", [WIDE], indirect=True)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_with_segments_of_their_own_make_no_tile(pair, dtype, monkeypatch):
    values, layout, mask, dense = pair
    for name in ("densify_tile", "compress_tile"):
        monkeypatch.setattr(Layout, name, None)
    tokens = torch.tensor([ROWS - 1, 0, 3, 3, 12], dtype=dtype)
    found = [F.embedding(tokens, w) for w in (read(values, layout), dense)]
    assert torch.equal(*found)
    for rows in found:
        rows.pow(2).sum().backward()
    assert torch.equal(values.grad, dense.grad[mask])


@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layer_makes_no_tile_without_gradients(precision, monkeypatch):
    layer = nn.Embedding(ROWS, WIDE, padding_idx=3).to(precision)
    mask = torch.rand(ROWS, WIDE) < 0.3
    expected = layer.weight.detach() * mask
    sparsify(layer, {"weight": mask})
    monkeypatch.setattr(Layout, "densify_tile", None)
    tokens = torch.randint(ROWS, (2, 7))
    with torch.no_grad():
        assert torch.equal(layer(tokens), F.embedding(tokens, expected))


def test_a_layer_outside_of_its_range_raises_torchs_error():
    layer = nn.Embedding(ROWS, WIDE)
    sparsify(layer, {"weight": torch.rand(ROWS, WIDE) < 0.3})
    with torch.no_grad(), pytest.raises(IndexError, match="out of range"):
        layer(torch.tensor([ROWS]))


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_other_settings_use_the_dense_weight(pair, settings):
    values, layout, _, dense = pair
    tokens = torch.tensor([3, 3, 200])
    with torch.no_grad():
        weights = read(values.detach(), layout), dense.detach()
    torch.testing.assert_close(*[F.embedding(tokens, w, **settings) for w in weights])
