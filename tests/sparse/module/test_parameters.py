from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn, optim
from torch.optim import AdamW

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.module.parameters import (
    forget,
    layouts,
    owned_parameters,
    owners,
    pack,
    set_values,
    sparse_parameters,
    state_bytes,
    unpack,
)
from tests.sparse.masking import Tied


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
    mask = torch.eye(11, 8, dtype=torch.bool)
    sparsify(model, {"head.weight": mask}, compute="samo")
    tied, bias = owned_parameters(model)
    assert [*sparse_parameters(model)] == ["embedding.weight"]
    assert sparse_parameters(model)["embedding.weight"].parameter is tied.parameter
    assert torch.equal(layouts(model)["embedding.weight"].mask(), mask)
    assert (tied.form.dtype, tied.form.backend.compute) == (torch.float32, "samo")
    assert (tied.shape, bias.shape) == ((11, 8), (11,))
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


CPU = torch.device("cpu")


class TiedTwice(nn.Module):
    """One weight of two layers, a bias, and a second weight in a layer that keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Bilinear(6, 6, 6)
        self.three = nn.Linear(6, 6)
        self.three.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x), x))


def trained() -> tuple[TiedTwice, AdamW]:
    torch.manual_seed(0)
    module = TiedTwice()
    sparsify(module, {n: torch.rand_like(p) > 0.5 for n, p in module.named_parameters()})
    optimizer = AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    return module, optimizer


def step(module: TiedTwice, optimizer: AdamW) -> None:
    optimizer.zero_grad()
    module(torch.arange(12.0).view(2, 6)).square().mean().backward()
    optimizer.step()


def test_a_parameter_that_was_packed_and_unpacked_trains_on_unchanged() -> None:
    stayed, other = trained()
    moved, optimizer = trained()
    owned = owners(moved)
    for name, parameter in list(moved.named_parameters()):
        packed = pickle.loads(pickle.dumps(pack(parameter, owned[name], [optimizer])))
        forget(parameter, owned[name], [optimizer])
        parameter.data = torch.empty(0)
        assert parameter not in optimizer.state
        assert name not in layouts(moved)
        unpack(packed, parameter, owned[name], [optimizer], CPU)
    assert moved.one.weight.sparse_layout is moved.three.weight.sparse_layout
    step(stayed, other)
    step(moved, optimizer)
    for name, value in stayed.state_dict().items():
        assert torch.equal(moved.state_dict()[name], value)


def test_a_layer_gets_its_class_back_when_all_its_weights_were_forgotten() -> None:
    module, _ = trained()
    sparse, owned = layouts(module), owners(module)
    dense = copy.deepcopy(sparse["two.weight"])
    forget(module.two.weight, owned["two.weight"], [])
    assert set(layouts(module)) == set(sparse) - {"two.weight"}
    assert type(module.two) is not nn.Bilinear
    forget(module.two.bias, owned["two.bias"], [])
    assert type(module.two) is nn.Bilinear
    assert dense.nnz == sparse["two.weight"].nnz


def test_a_packed_parameter_holds_no_more_than_its_parameter() -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(1000)[:10])])
    assert pack(module[0], [(module, "0")], []).values.untyped_storage().nbytes() == 40


def trained_linear():
    model = nn.Linear(10, 20)
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_bytes_before_and_after_the_swap():
    model, optimizer = trained_linear()
    dense = state_bytes(model, optimizer)
    assert (dense.weights, dense.indices, dense.gradients) == (880, 0, 880)
    assert dense.optimizer == 2 * 880 + 2 * 4  # two moments, and a step count a parameter
    mask = torch.zeros(20, 10, dtype=torch.bool)
    mask[:2] = True
    sparsify(model, {"weight": mask}, optimizer)
    sparse = state_bytes(model, optimizer)
    indices = 2 * 4 + 17 * 2 + 20  # starts, counts and offsets
    assert (sparse.weights, sparse.indices, sparse.gradients) == (160, indices, 160)
    assert sparse.optimizer == 2 * 160 + 2 * 4
    assert sparse.total == 160 + indices + 160 + 328


def test_shared_storage_counts_once_and_the_meta_device_not_at_all():
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert state_bytes(tied).total == 64
    tied[0].weight.grad = torch.ones(8, 4)[:4]  # part of a larger buffer
    assert state_bytes(tied).gradients == 128
    tied.append(nn.Linear(100, 100, device="meta"))
    assert state_bytes(tied).weights == 64
    sparsify(tied, {"0.weight": torch.eye(4, dtype=torch.bool)})
    assert state_bytes(tied).indices == 2 * 4 + 16 * 2 + 4  # starts, counts and offsets


def test_a_sparse_gradient_counts_its_rows():
    embedding = nn.Embedding(100, 8, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert state_bytes(embedding).gradients == 2 * 8 * 4 + 2 * 8
