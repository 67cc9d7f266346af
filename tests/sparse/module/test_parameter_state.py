from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.optim import AdamW

from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.module.parameter_state import forget, pack, unpack
from lightning_axosparse.sparse.module.parameters import layouts, owners

CPU = torch.device("cpu")


class Tied(nn.Module):
    """One weight of two layers, a bias, and a second weight in a layer that keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Bilinear(6, 6, 6)
        self.three = nn.Linear(6, 6)
        self.three.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x), x))


def trained() -> tuple[Tied, AdamW]:
    torch.manual_seed(0)
    module = Tied()
    sparsify(module, {n: torch.rand_like(p) > 0.5 for n, p in module.named_parameters()})
    optimizer = AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    return module, optimizer


def step(module: Tied, optimizer: AdamW) -> None:
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
    assert moved.one.weight.entries is moved.three.weight.entries
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
