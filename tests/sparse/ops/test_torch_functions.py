from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_axosparse.sparse.ops import torch_functions
from lightning_axosparse.sparse.ops.torch_functions import MIN_ENTRIES, read_weight
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm

COLUMNS = 512


@pytest.fixture
def densified(monkeypatch):
    """The shapes of the weights that were materialized whole."""
    shapes = []
    densify = Layout.densify
    monkeypatch.setattr(
        Layout, "densify", lambda *args: shapes.append(args[0].shape) or densify(*args)
    )
    return shapes


def weight(entries):
    mask = torch.rand(entries // COLUMNS, COLUMNS) < 0.1
    values = nn.Parameter(torch.randn(int(mask.sum())))
    return read_weight(values, layout_of(mask), DenseForm(values.dtype))


def test_a_large_weight_is_never_dense_whole_while_gradients_are_recorded(densified):
    large = weight(MIN_ENTRIES)
    F.linear(torch.ones(2, COLUMNS), large).sum().backward()
    F.embedding(torch.tensor([1, 3]), large).sum().backward()
    assert densified == []


def test_a_small_weight_and_one_read_without_gradients_are_made_dense(densified):
    F.linear(torch.ones(2, COLUMNS), weight(MIN_ENTRIES // 2))
    with torch.no_grad():
        F.linear(torch.ones(2, COLUMNS), weight(MIN_ENTRIES))
    assert len(densified) == 2


@pytest.mark.parametrize("function", torch_functions.REPLACEMENTS)
def test_a_replacement_declines_a_dense_weight(function):
    dense = torch.ones(4, 4)
    operands = (dense[0], dense, dense) if "addmm" in function.__name__ else (dense, dense)
    assert torch_functions.REPLACEMENTS[function](*operands) is NotImplemented


def test_other_functions_and_other_operands_use_the_dense_weight(densified):
    large = weight(MIN_ENTRIES)
    torch.testing.assert_close(large.abs().sum(), large.dense().abs().sum())
    inputs = torch.ones(2, COLUMNS, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(inputs, large)
    assert densified
