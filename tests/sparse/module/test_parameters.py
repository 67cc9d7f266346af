from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.module.parameters import (
    layouts,
    owned_parameters,
    owners,
    set_values,
    sparse_parameters,
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


def test_a_tied_parameter_is_listed_once_with_all_its_owners():
    model = Tied()
    tied, bias = owned_parameters(model)
    assert tied.parameter is model.head.weight
    assert tied.names == ["embedding.weight", "head.weight"]
    assert tied.owners == [(model.embedding, "weight"), (model.head, "weight")]
    assert bias.names == ["head.bias"]
    assert owners(model) == {"embedding.weight": tied.owners, "head.bias": bias.owners}


def test_only_sparse_parameters_have_a_layout_and_a_dense_form():
    model = Tied()
    mask = torch.eye(5, 4, dtype=torch.bool)
    sparsify(model, {"head.weight": mask}, policy="samo")
    tied, bias = owned_parameters(model)
    assert sparse_parameters(model) == {"embedding.weight": tied}
    assert torch.equal(layouts(model)["embedding.weight"].mask(), mask)
    assert (tied.form.dtype, tied.form.policy) == (torch.float32, "samo")
    assert (tied.shape, bias.shape) == ((5, 4), (5,))
    assert bias.layout is bias.form is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_accumulate_in_the_new_shape(dtype):
    parameter = nn.Parameter(torch.ones(3, 4))
    node = parameter.expand_as(parameter).grad_fn  # keeps the gradient accumulator alive
    parameter.grad = torch.ones_like(parameter)
    set_values(parameter, torch.arange(5, dtype=dtype), torch.ones(5, dtype=dtype))
    assert torch.equal(parameter, torch.arange(5, dtype=dtype))
    (3 * parameter).sum().backward()
    assert torch.equal(parameter.grad, torch.full((5,), 4, dtype=dtype))
    assert node is not None
