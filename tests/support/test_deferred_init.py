"""Deferred tensors get the values, to the bit, that they would have had at once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse import sparsify
from lightning_axosparse.support.deferred_init import DeferredInit

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


class Custom(nn.Module):
    """Initialises itself by loops, branches on values and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5) * 0.1)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).masked_fill(torch.eye(6) > 0, -1))
        self.register_buffer("inverse", 1 / 100 ** (torch.arange(4).float() / 8), persistent=False)
        with torch.no_grad():
            for index in range(7):
                self.weight[index] += index * torch.rand(5)
            if self.weight.abs().max().item() > 0.5:
                self.weight.mul_(0.5)
            self.weight[0] = 5
            self.weight[[2, 3]] = torch.ones(5)
            self.weight[torch.tensor([4, 5]), np.array([0, 1])] = 7.5
            self.weight[self.weight < 0.1] = -2
        self.plain = torch.linspace(0, 1, 5)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.numbers = [self.plain.tolist(), float(self.weight.detach().numpy().sum())]


def layers() -> list[nn.Module]:
    """Layers of every kind of initialisation."""
    orthogonal, truncated, tied = (nn.Linear(16, 16) for _ in range(3))
    nn.init.orthogonal_(orthogonal.weight)
    nn.init.trunc_normal_(truncated.weight, std=0.02)
    nn.init.sparse_(truncated.weight, 0.3)
    tied.weight = truncated.weight
    given, drawn, counted = (nn.Linear(4, 4) for _ in range(3))
    given.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    given.bias.data = torch.randperm(4).float()
    drawn.weight.data.copy_(torch.bernoulli(torch.full((4, 4), 0.3)))
    positive = (counted.weight.detach() > 0).nonzero()
    counted.bias.data.fill_(len(positive))
    return [
        orthogonal,
        truncated,
        tied,
        given,
        drawn,
        counted,
        copy.deepcopy(orthogonal),
        Custom(),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=False), 2),
        nn.LSTM(5, 6, 2),
        nn.Conv2d(3, 4, 3),
        nn.Embedding(11, 5, padding_idx=2),
        nn.BatchNorm1d(5),
        nn.Linear(4, 4).half(),
        nn.Linear(4, 4).to("cpu", torch.float64),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    ]


def tensors() -> list[Tensor]:
    """Tensors of operators that initialisation code calls."""
    w, k = torch.randn(6, 6), torch.as_tensor([1.0, 2.0])
    w[:, torch.tensor([1, 3])] *= 3
    table = torch.zeros(8, 4)
    angles = torch.arange(8).unsqueeze(1) * torch.exp(torch.arange(0, 4, 2) * -0.5)
    table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
    e = nn.init.xavier_uniform_(torch.empty(3, 3))
    e[0, 0] = float(torch.eye(3).sum())
    e[torch.rand(3, 3) < 0.5] = 0
    e.mul_(k[0]).clamp_(-1, 1).view(-1)[1:3].zero_()
    halves = torch.rand(4).split(2)
    halves[0].add_(1)
    return [
        w,
        table,
        e,
        *halves,
        torch.where(w > 1, 0.0, float("-inf")),
        torch.where(w > 1, w, 2.0),
        torch.triu(torch.full((6, 6), float("-inf")), 1),
        w.new_zeros(3),
        torch.zeros(3, device=w.device),
        torch.cat([k, torch.rand(2)]),
        w[w > 0],
        torch.linalg.svd(e)[1],
        torch.einsum("ij,jk->ik", e, e),
        torch.stack([torch.rand(3).bfloat16() for _ in range(3)]),
        torch.rand(5).topk(2).indices,
        torch.multinomial(torch.rand(6), 3),
        nn.functional.dropout(torch.ones(9), 0.5),
        torch.tensor([1, 2]),
        torch.from_numpy(np.ones(3)),
    ]


def made(build: Callable[[], Any], deferred: DeferredInit | None) -> tuple[Any, Tensor]:
    """What ``build`` makes, and the number that is drawn next."""
    torch.manual_seed(3)
    if deferred is None:
        return build(), torch.rand(1)
    with deferred:
        found = build()
    return found, torch.rand(1)


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.stride() == other.stride()
    assert one.device == other.device
    assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_layers_of_every_kind_have_the_values_that_they_would_have_had() -> None:
    at_once, drawn = made(layers, None)
    deferred = DeferredInit()
    later, drawn_later = made(layers, deferred)
    assert torch.equal(drawn, drawn_later)
    parameters = [p for layer in later for p in layer.parameters()]
    assert all(parameter.is_meta for parameter in parameters)
    deferred.initialize_except([])
    for one, other in zip(at_once, later, strict=True):
        pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
        for (name, here), (name_there, there) in pairs:
            assert name == name_there
            assert there.requires_grad == here.requires_grad
            assert_same(here, there)
        for here, there in zip(one.buffers(), other.buffers(), strict=True):
            assert_same(here, there)
    assert [p for layer in later for p in layer.parameters()] == parameters or all(
        a is b for a, b in zip(parameters, (p for x in later for p in x.parameters()), strict=True)
    )
    assert later[2].weight is later[1].weight
    ours, theirs = at_once[7], later[7]
    assert_same(ours.plain, theirs.plain)
    assert (ours.rates, ours.numbers) == (theirs.rates, theirs.numbers)
    later[0](torch.ones(2, 16)).sum().backward()
    assert later[0].weight.grad is not None


def test_operators_have_the_results_that_they_would_have_had() -> None:
    at_once, drawn = made(tensors, None)
    deferred = DeferredInit()
    later, drawn_later = made(tensors, deferred)
    assert torch.equal(drawn, drawn_later)
    deferred.initialize_except([])
    for here, there in zip(at_once, later, strict=True):
        assert_same(here, there)


def test_what_is_left_out_stays_without_memory_and_changes_nothing_else() -> None:
    at_once, _ = made(layers, None)
    deferred = DeferredInit()
    later, _ = made(layers, deferred)
    left_out = [*later[0].parameters(), *later[8].parameters()]
    deferred.initialize_except(left_out)
    assert all(parameter.is_meta for parameter in left_out)
    for index in (1, 6, 7, 9, 16):
        for here, there in zip(at_once[index].parameters(), later[index].parameters(), strict=True):
            assert_same(here, there)


def test_a_view_of_a_made_tensor_is_a_view_of_it_still() -> None:
    deferred = DeferredInit()
    with deferred:
        whole = torch.zeros(6)
        part = whole[2:4]
    deferred.initialize_except([])
    whole.fill_(7)
    assert part.tolist() == [7, 7]


def held_in_many_ways() -> Any:
    """Tensors that no module has as a parameter or a buffer."""
    layer, alias = nn.Linear(3, 2), nn.Linear(2, 2)
    weights = torch.rand(3)
    return {
        "alias": alias.weight.data,
        "closure": lambda: weights,
        "partial": partial(nn.functional.cross_entropy, weight=torch.rand(4)),
        "parameter": [nn.Parameter(torch.rand(2))],
        "copies": (copy.copy(layer.weight), copy.deepcopy(layer)),
        "object": SimpleNamespace(table=torch.rand(2, 2).T[1]),
        "detached": layer.weight.detach(),
        "buffer": nn.Buffer(torch.rand(2)),
        "layer": layer,
    }


@pytest.mark.parametrize("build", [layers, tensors, held_in_many_ways])
def test_no_tensor_that_there_is_stays_without_values(build: Callable[[], Any]) -> None:
    deferred = DeferredInit()
    held, _ = made(build, deferred)
    deferred.initialize_except([])
    there = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    assert held
    assert not [tuple(each.shape) for each in there if deferred.device_of(each) is not None]


def test_code_sees_the_device_on_which_a_tensor_will_be() -> None:
    with DeferredInit():
        weight = torch.empty(3)
        assert weight.device == torch.device("cpu")
        assert weight.is_cpu
        assert not weight.is_meta
        assert torch.empty(3, device="meta").is_meta
        with torch.device("meta"):
            assert torch.empty(3).is_meta
    assert weight.is_meta


def test_a_tensor_that_was_asked_for_on_the_meta_device_stays_there() -> None:
    deferred = DeferredInit()
    with deferred:
        asked = torch.empty(3, device="meta")
        with torch.device("meta"):
            layer = nn.Linear(2, 2)
    deferred.initialize_except([])
    assert asked.is_meta
    assert layer.weight.is_meta


def test_an_array_cannot_be_written_because_no_weight_would_change() -> None:
    with DeferredInit():
        weight = torch.zeros(3)
        with pytest.raises(ValueError, match="read-only"):
            weight.numpy()[0] = 1


def test_a_source_that_changes_after_it_was_copied_is_refused() -> None:
    deferred, source = DeferredInit(), torch.ones(3)
    with deferred:
        weight = torch.empty(3).copy_(source)
    source.add_(1)
    with pytest.raises(RuntimeError, match="Give `copy_` a clone"):
        deferred.initialize_except([])
    assert weight.is_meta


def test_a_gradient_hook_that_would_be_lost_is_refused() -> None:
    deferred = DeferredInit()
    with deferred:
        layer = nn.Linear(2, 2)
        layer.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(RuntimeError, match="Register the hook in `on_fit_start`"):
        deferred.initialize_except([])


def test_errors_of_the_code_are_those_that_it_would_have_raised() -> None:
    with DeferredInit(), pytest.raises(RuntimeError, match="must match the size"):
        torch.zeros(3).copy_(torch.zeros(4))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_of_a_file_are_loaded(tmp_path: Path, mapped: bool, weights_only: bool) -> None:
    saved, path = nn.Linear(4, 3), tmp_path / "weights.pt"
    torch.save(saved.state_dict(), path)
    deferred = DeferredInit()
    with deferred:
        module = nn.Linear(4, 3)
        module.load_state_dict(torch.load(path, mmap=mapped, weights_only=weights_only))
    weight = module.weight
    assert weight.is_meta
    deferred.initialize(weight)
    assert module.bias.is_meta
    deferred.initialize_except([module.bias])
    assert module.weight is weight
    assert torch.equal(weight, saved.weight)
    assert module.bias.is_meta


def test_storing_sparse_before_there_are_values_says_where_to_do_it() -> None:
    with DeferredInit():
        module = nn.Linear(4, 3)
        with pytest.raises(ValueError, match=r"configure_model.*GradualPruning\(ticket="):
            sparsify(module, {"weight": torch.eye(3, 4) > 0})
