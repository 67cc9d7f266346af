from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse import CorruptFileError
from lightning_axosparse.pruning.channel_ticket import (
    ChannelTicket,
    channel_masks,
    layer_inputs,
    layer_outputs,
    prune_inputs,
    prune_outputs,
    validate_channelwise_optimizer,
)
from tests.pruning.networks import NETWORKS, images, made, resnet, vgg

LAYERS = {
    nn.Conv1d: (nn.Conv1d(5, 4, 3), (2, 5, 3)),
    nn.Conv2d: (nn.Conv2d(5, 4, 3), (2, 5, 3, 3)),
    nn.Conv3d: (nn.Conv3d(5, 4, 2), (2, 5, 2, 2, 2)),
    nn.ConvTranspose1d: (nn.ConvTranspose1d(5, 4, 3), (2, 5, 3)),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(5, 4, 3), (2, 5, 3, 3)),
    nn.ConvTranspose3d: (nn.ConvTranspose3d(5, 4, 2), (2, 5, 2, 2, 2)),
    nn.Linear: (nn.Linear(5, 4), (2, 5)),
}
INPUTS = torch.tensor([True, False, True, True, False])
OUTPUTS = torch.tensor([False, True, True, False])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_its_kept_outputs_of_its_kept_inputs(kind: type[nn.Module]) -> None:
    layer, shape = LAYERS[kind]
    layer = layer.double()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    x = torch.randn(shape, dtype=torch.float64)
    layer(x).square().sum().backward()
    optimizer.step()
    x[:, ~INPUTS] = 0
    expected = layer(x)[:, OUTPUTS]
    moments = [optimizer.state[p]["momentum_buffer"].clone() for p in layer.parameters()]
    prune_inputs(layer, INPUTS, [optimizer])
    prune_outputs(layer, OUTPUTS, [optimizer])
    assert (layer_inputs(layer), layer_outputs(layer)) == (3, 2)
    assert torch.allclose(layer(x[:, INPUTS]), expected, rtol=0, atol=1e-12)
    assert layer.weight.is_leaf
    for parameter, moment in zip(layer.parameters(), moments, strict=True):
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum.shape == parameter.grad.shape == parameter.shape
        assert torch.isin(momentum, moment).all()
    layer(x[:, INPUTS]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_a_batch_norm_keeps_what_belongs_to_its_channels(options: dict[str, bool]) -> None:
    norm = nn.BatchNorm2d(4, **options).double()
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    norm(x)
    expected = norm.eval()(x)[:, OUTPUTS]
    prune_outputs(norm, OUTPUTS, [])
    assert layer_outputs(norm) == norm.num_features == 2
    assert torch.equal(norm(x[:, OUTPUTS]), expected)


def test_optimizers_whose_state_has_other_shapes_are_told() -> None:
    weight = [nn.Parameter(torch.ones(2, 2))]
    for optimizer in (
        torch.optim.SGD(weight),
        torch.optim.AdamW(weight),
        torch.optim.NAdam(weight),
    ):
        validate_channelwise_optimizer(optimizer)
        assert not optimizer.state
    with pytest.raises(ValueError, match="'row_var' of parameter 'any weight'"):
        validate_channelwise_optimizer(torch.optim.Adafactor(weight))


def zeroed(network: nn.Module, ticket: ChannelTicket) -> nn.Module:
    """A network whose dropped channels have a scale and a shift of zero."""
    masked = copy.deepcopy(network)
    hold_at_zero(masked, ticket)
    return masked


@torch.no_grad()
def hold_at_zero(network: nn.Module, ticket: ChannelTicket) -> None:
    for name, mask in ticket.masks.items():
        norm = network.get_submodule(name)
        norm.weight[~mask] = norm.bias[~mask] = 0.0


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.floats(0.01, 0.99),
    st.floats(0, 1),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_the_largest_scales_stay_above_the_floors(
    sizes: list[int], ratio: float, floor: float, seed: int, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = {str(n): torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    if ties:
        scales = {name: scale.round() for name, scale in scales.items()}
    masks = channel_masks(scales, ratio, floor)
    assert {name: mask.shape for name, mask in masks.items()} == {
        name: scale.shape for name, scale in scales.items()
    }
    least = {n: max(1, math.ceil(floor * (1 - ratio) * len(s))) for n, s in scales.items()}
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    assert all(counts[name] >= least[name] for name in counts)
    wanted = sum(sizes) - round(ratio * sum(sizes))
    assert sum(counts.values()) == max(wanted, sum(least.values()))
    free = [n for n in counts if counts[n] > least[n]]  # Floors do not decide there.
    if free:
        lowest = min(float(scales[n].abs()[masks[n]].min()) for n in free)
        for name, mask in masks.items():
            if not mask.all():
                assert scales[name].abs()[~mask].max() <= lowest
    for name, mask in masks.items():
        if not mask.all():
            assert scales[name].abs()[~mask].max() <= scales[name].abs()[mask].min()


def test_scales_that_are_nan_are_refused() -> None:
    with pytest.raises(ValueError, match="Scores are NaN in b"):
        channel_masks({"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])}, 0.5, 0.0)


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=5, deadline=None)
@given(ratio=st.floats(0.05, 0.95), floor=st.floats(0, 0.5), seed=st.integers(0, 2**16))
def test_the_shrunk_network_computes_what_the_masked_one_does(
    name: str, ratio: float, floor: float, seed: int
) -> None:
    network = made(name, seed)
    ticket = ChannelTicket.largest(network, ratio, floor)
    masked = zeroed(network, ticket)
    sizes = [p.numel() for p in network.parameters()]
    ticket.apply(network)
    assert [p.numel() for p in network.parameters()] != sizes or ticket.sparsity == 0
    for training in (True, False):
        for each in (network, masked):
            each.train(training)
        assert distance(network(images()), masked(images())) <= 1e-12
    for layer, mask in ticket.channels.output_masks(ticket.masks).items():
        statistics = getattr(network.get_submodule(layer), "running_var", None)
        if statistics is not None:
            assert distance(statistics, masked.get_submodule(layer).running_var[mask]) <= 1e-12


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    # A bias before a BatchNorm has a gradient of mere rounding, which a smaller eps magnifies.
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-4, centered=True, momentum=0.5),
}


def step(network: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    labels = torch.arange(4) % 5
    optimizer.zero_grad()
    loss = F.cross_entropy(network(images(seed=seed)), labels)
    loss.backward()
    optimizer.step()
    return float(loss)


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(["vgg", "resnet", "unet"], OPTIMIZERS, strict=True)]
)
def test_training_goes_on_as_masked_training_does(name: str, kind: str) -> None:
    """Also across a draw between a backward pass and its step."""
    network = made(name)
    optimizer = OPTIMIZERS[kind](network.parameters())
    for seed in range(3):
        step(network, optimizer, seed)
    masked, parameters = copy.deepcopy(network), list(network.parameters())
    other = OPTIMIZERS[kind](masked.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ticket = ChannelTicket.largest(network, 0.5)
    ticket.apply(network, [optimizer])
    hold_at_zero(masked, ticket)
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        state = optimizer.state[parameter].values()
        assert {v.shape for v in state if isinstance(v, Tensor) and v.dim()} == {parameter.shape}
    for seed in range(3, 8):
        ours, theirs = step(network, optimizer, seed), step(masked, other, seed)
        assert ours == pytest.approx(theirs, abs=1e-12)
        hold_at_zero(masked, ticket)
    ticket.apply(masked)
    for one, two in zip(network.parameters(), masked.parameters(), strict=True):
        assert distance(one, two) <= 1e-12


def test_a_network_is_shrunk_once() -> None:
    network = made("resnet")
    ticket = ChannelTicket.largest(network, 0.5)
    ticket.apply(network)
    expected = copy.deepcopy(network.state_dict())
    ticket.apply(network)
    ticket.validate(network)
    assert all(torch.equal(v, expected[k]) for k, v in network.state_dict().items())
    assert network[1].conv1.out_channels == network[1].conv2.in_channels
    assert network[1].bn1.num_features == network[1].conv1.out_channels < 6
    assert str(network[1].conv1.out_channels) in repr(network)


def test_another_network_is_refused_before_it_changes() -> None:
    ticket = ChannelTicket.largest(made("vgg"), 0.5)
    wider = vgg()
    wider[4], wider[5] = nn.Conv2d(8, 20, 3), nn.BatchNorm2d(20)
    before = copy.deepcopy(wider.state_dict())
    with pytest.raises(ValueError, match=r"keeps \d+ of 12 channels of '4', which has 20"):
        ticket.apply(wider)
    assert all(torch.equal(v, before[k]) for k, v in wider.state_dict().items())
    with pytest.raises(ValueError, match=r"'0'.*a Sequential of that name"):
        ticket.apply(resnet())
    with pytest.raises(ValueError, match=r"'0'.*no such layer"):
        ticket.validate(nn.Module())


def test_optimizer_state_of_other_shapes_is_refused_before_anything_changes() -> None:
    network = made("vgg")
    optimizer = torch.optim.Adafactor(network.parameters())
    step(network, optimizer, 0)
    with pytest.raises(ValueError, match=r"Optimizer state 'row_var' of parameter '0\.weight'"):
        ChannelTicket.largest(network, 0.5).apply(network, [optimizer])
    assert network[0].out_channels == len(network[0].weight) == 8


def test_a_freshly_built_network_is_shrunk_by_the_file_of_a_ticket(tmp_path: Path) -> None:
    network = made("resnet")
    ticket = ChannelTicket.largest(network, 0.5)
    ticket.save(tmp_path / "channels.pt")
    ticket.apply(network)
    loaded = ChannelTicket.load(tmp_path / "channels.pt")
    assert loaded == ticket
    assert repr(loaded) == "ChannelTicket(3 layers, 13 of 26 channels kept, step=None)"
    assert loaded.layer_channels().keys() == {"1.bn1", "2.bn1", "3.bn1"}
    assert loaded.sparsity == pytest.approx(0.5)
    fresh = resnet().double()
    loaded.apply(fresh)
    fresh.load_state_dict(network.state_dict())
    assert torch.equal(fresh.eval()(images()), network.eval()(images()))
    meta = resnet().to("meta")
    loaded.apply(meta)
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    assert {name: tensor.shape for name, tensor in meta.state_dict().items()} == shapes


def test_a_file_without_a_ticket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        ChannelTicket.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError, match="make one file"):
        ChannelTicket.load(tmp_path)
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    with pytest.raises(CorruptFileError, match="no ticket of channels"):
        ChannelTicket.load(tmp_path / "plain.ckpt")
    state = ChannelTicket.largest(made("vgg"), 0.5).state_dict()
    with pytest.raises(CorruptFileError, match="ChannelTicket/0"):
        ChannelTicket.from_state_dict({**state, "format": "lightning_axosparse.ChannelTicket/0"})


ODD = {
    "no table": lambda state: state.update(channels=3),
    "a table too few": lambda state: state["channels"].pop("outputs"),
    "a table too many": lambda state: state["channels"].update(more={}),
    "no scales": lambda state: state["channels"].update(scales=["features.1"]),
    "another scale": lambda state: state["channels"]["scales"].update(other=4),
    "a size that is a text": lambda state: state["channels"]["scales"].update({SCALE: "8"}),
    "no name of a scale": lambda state: state["channels"]["outputs"].update(features=[1]),
    "outputs of nothing": lambda state: state["channels"]["outputs"].update(features="nothing"),
    "inputs that are a number": lambda state: state["channels"]["inputs"].update(features=3),
    "a segment that is a text": lambda state: state["channels"]["inputs"].update(features=["a"]),
    "a segment of nothing": lambda state: state["channels"]["inputs"].update(
        features=[{"scale": "nothing", "entries": 8}]
    ),
    "a segment of half": lambda state: state["channels"]["inputs"].update(
        features=[{"scale": SCALE, "entries": 8.5}]
    ),
    "a segment of too few": lambda state: state["channels"]["inputs"].update(
        features=[{"scale": SCALE, "entries": 1}]
    ),
    "reasons that are a text": lambda state: state["channels"].update(whole="because"),
    "no masks": lambda state: state.update(masks=None),
    "no format": lambda state: state.pop("format"),
}
SCALE = next(iter(ChannelTicket.largest(made("vgg"), 0.5).channels.scales))


@pytest.mark.parametrize("odd", ODD)
def test_odd_contents_are_refused_in_words(odd: str) -> None:
    state = copy.deepcopy(ChannelTicket.largest(made("vgg"), 0.5).state_dict())
    ODD[odd](state)
    with pytest.raises(ValueError, match=r"See .*troubleshooting"):
        ChannelTicket.from_state_dict(state)
