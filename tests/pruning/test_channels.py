from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_axosparse.pruning.channels import Segment, find_channels
from tests.pruning.networks import NETWORKS, conv, resnet, vgg

FOUND: dict[str, tuple[dict[str, int], dict[str, list[tuple[str | None, int]]], set[str]]] = {
    "vgg": (
        {"1": 8, "5": 12, "10": 10},
        {"4": [("1", 8)], "9": [("5", 48)], "12": [("10", 10)]},
        {"12"},
    ),
    "resnet": (
        {"1.bn1": 6, "2.bn1": 10, "3.bn1": 10},
        {"1.conv2": [("1.bn1", 6)], "2.conv2": [("2.bn1", 10)], "3.conv2": [("3.bn1", 10)]},
        {"0.0", "1.conv2", "2.conv2", "2.shortcut.0", "3.conv2"},
    ),
    "unet": (
        {"down.1": 6, "middle.1": 9, "up.1": 7},
        {
            "middle.0": [("down.1", 6)],
            "up.0": [("middle.1", 9)],
            "out": [("up.1", 7), ("down.1", 6)],
        },
        {"out"},
    ),
    "densenet": ({"norm2": 8}, {"conv2": [("norm2", 8)]}, {"stem", "conv2", "norm3"}),
    "mobilenet": (
        {"bn3": 6},
        {"head.linear": [("bn3", 6)]},
        {"expand", "depthwise", "squeeze", "head.linear"},
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_can_be_removed(name: str, device: str) -> None:
    channels = find_channels(NETWORKS[name]().to(device))
    scales, inputs, whole = FOUND[name]
    assert channels.scales == scales
    assert {k: [(s.scale, s.entries) for s in v] for k, v in channels.inputs.items()} == inputs
    assert {*channels.whole} == whole
    assert {*channels.outputs.values()} == {*scales}
    assert all(channels.outputs[scale] == scale for scale in scales)


class Between(nn.Module):
    """A convolution and a BatchNorm, then ``code``, then a layer that reads channels."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.code = conv(3, 6), nn.BatchNorm2d(6), code
        self.second, self.norm2, self.third = conv(6, 6), nn.BatchNorm2d(6), conv(6, 2)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.code(self, self.norm(self.first(x)))
        return self.third(F.relu(self.norm2(self.second(x))))


class Undecided(nn.Module):
    """Its code depends on its input."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -x


class Counting(nn.Conv2d):
    """Not a plain convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


tied, other, shared = conv(6, 6), conv(6, 6), conv(6, 6)
tied.weight = other.weight


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def before(m: Any, x: Tensor) -> Tensor:
    return x + m.first.weight.sum()


STAYS: dict[str, tuple[Between, str]] = {
    "sigmoid of 0": (Between(lambda m, x: torch.sigmoid(x)), "sigmoid reads them"),
    "a layer of it": (Between(lambda m, x: m.act(x), act=nn.Sigmoid()), "'act' .Sigmoid. reads"),
    "a constant": (Between(lambda m, x: x + 1), "added to others"),
    "softmax over channels": (Between(lambda m, x: x.softmax(1)), "softmax reads them"),
    "their number as a size": (Between(lambda m, x: x * x.size(1)), "their number is read"),
    "their number": (Between(lambda m, x: x * x.shape[1] ** -0.5), "their number is read"),
    "size": (Between(lambda m, x: x.view(x.size())), "view reads them"),
    "a fixed width": (Between(lambda m, x: x.view(-1, 6, 8, 8)), "view reads them"),
    "indices": (
        Between(lambda m, x: m.pool(x)[0], pool=nn.MaxPool2d(1, return_indices=True)),
        "'pool' .MaxPool2d. reads",
    ),
    "other indices": (
        Between(lambda m, x: F.max_pool2d(x, 1, return_indices=True)[0]),
        "max_pool2d_with_indices reads",
    ),
    "a weight that is read": (Between(before), "read elsewhere"),
    "a scale that is read": (Between(lambda m, x: (m.norm.weight.sum(), x)[1]), "read elsewhere"),
    "a layer that runs elsewhere, too": (
        Between(lambda m, x: m.conv(x) + m.odd(x), conv=shared, odd=Undecided(shared)),
        "called more than once",
    ),
    "a hook": (Between(lambda m, x: m.hooked(x), hooked=hooked(conv(6, 6))), "forward hooks"),
    "a hook of a container": (
        Between(lambda m, x: m.hooked(x), hooked=hooked(nn.Sequential(nn.ReLU()))),
        "'hooked' reads them: it has forward hooks",
    ),
    "cannot be traced": (
        Between(lambda m, x: m.odd(x), odd=nn.Sequential(Undecided())),
        r"'odd.0' \(Undecided\) reads them",
    ),
    "a subclass": (Between(lambda m, x: m.conv(x), conv=Counting(6, 6, 1)), "reads them"),
    "a weight that is computed": (
        Between(lambda m, x: m.conv(x), conv=parametrizations.weight_norm(conv(6, 6))),
        "'conv' .ParametrizedConv2d. reads",
    ),
    "a linear layer over a map": (
        Between(lambda m, x: m.linear(x), linear=nn.Linear(8, 8)),
        "'linear' .Linear. reads",
    ),
    "a layer twice": (
        Between(lambda m, x: m.conv(m.conv(x)), conv=conv(6, 6)),
        "called more than once",
    ),
    "a shared weight": (Between(lambda m, x: m.tied(x), tied=tied, other=other), "weight is tied"),
    "two norms": (Between(lambda m, x: m.more(x), more=nn.BatchNorm2d(6)), "another BatchNorm"),
    "no scale": (Between(lambda m, x: x), "tied, read elsewhere, or none"),
    "concatenated with an unknown": (
        Between(lambda m, x: torch.cat([x, torch.ones(1, 2, 8, 8)], 1)[:, :6]),
        "concatenated with others",
    ),
    "parts": (Between(lambda m, x: torch.cat(x.chunk(2, 1), 1)), "chunk reads them"),
    "concatenated elsewhere": (
        Between(lambda m, x: torch.cat([x, x], 2)),
        "concatenated with others",
    ),
}
STAYS["no scale"][0].norm = nn.BatchNorm2d(6, affine=False)


@pytest.mark.parametrize("case", STAYS)
def test_what_keeps_all_its_channels_says_why(case: str) -> None:
    network, why = STAYS[case]
    channels = find_channels(network)
    assert "norm" not in channels.scales
    assert "norm2" in channels.scales
    reasons = "; ".join(channels.whole.values())
    assert re.search(why, reasons), reasons


PASSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nothing": lambda m, x: x,
    "a dtype": lambda m, x: (m.norm.weight.dtype, x)[1],
    "functions": lambda m, x: F.dropout(F.leaky_relu(x.relu(), 0.1), 0.5, m.training).tanh(),
    "pooling": lambda m, x: F.interpolate(F.avg_pool2d(F.max_pool2d(x, 2), 2), scale_factor=4.0),
    "places": lambda m, x: F.interpolate(F.max_pool2d(x, 2), size=(x.shape[2], x.size(3))),
    "concatenated": lambda m, x: m.narrow(torch.cat((x, x.relu()), dim=1)),
    "concatenated by name": lambda m, x: m.narrow(torch.cat(tensors=[x, x.relu()], dim=1)),
}


@pytest.mark.parametrize("case", PASSES)
def test_zeros_pass_through(case: str) -> None:
    network = Between(PASSES[case], narrow=nn.Conv2d(12, 6, 1))
    assert {*find_channels(network).scales} >= {"norm", "norm2"}


class Volumes(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)).mean((-1, -2)))


def test_a_mean_over_two_of_three_dimensions_leaves_places() -> None:
    with pytest.raises(ValueError, match="mean reads them"):
        find_channels(Volumes(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4), nn.Linear(8, 2)))


FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: torch.flatten(x, 1),
    "method": lambda x: x.flatten(start_dim=1),
    "view": lambda x: x.view(x.size(0), -1),
    "reshape": lambda x: x.reshape((x.shape[0], -1)),
}


class Flat(nn.Module):
    def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))
        self.flatten, self.linear = flatten, nn.Linear(16, 2)

    def forward(self, x: Tensor, scale: float = 1.0, training: bool = False) -> Tensor:
        if training:
            x = x * scale
        return self.linear(self.flatten(self.body(x)))


@pytest.mark.parametrize("case", FLAT)
def test_a_flatten_has_several_inputs_a_channel(case: str) -> None:
    assert find_channels(Flat(FLAT[case])).inputs == {"linear": [Segment("body.1", 16)]}


def test_a_part_is_traced_by_its_name() -> None:
    module = nn.Module()
    module.model = vgg()
    module.other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"forward of Module cannot be traced .*network='model'"):
        find_channels(module)
    assert find_channels(module, "model").scales == {"model.1": 8, "model.5": 12, "model.10": 10}
    with pytest.raises(ValueError, match=r"network='modl' is no part .*model, other"):
        find_channels(module, "modl")


def test_a_network_without_such_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="0: '2' reads them without a BatchNorm before it"):
        find_channels(nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 2)))
    with pytest.raises(ValueError, match="There is no BatchNorm"):
        find_channels(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="1: it is not known whose outputs it normalizes"):
        find_channels(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="0: the network returns them"):
        find_channels(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4)))


def test_a_layer_whose_forward_was_replaced_is_traced_by_its_own() -> None:
    def replaced(x: Tensor) -> Tensor:
        raise AssertionError

    network = resnet()
    expected = find_channels(network)
    for layer in network:
        layer.forward = replaced  # as in a pipeline
    assert find_channels(network) == expected


def test_the_text_names_each_reason_once() -> None:
    text = str(find_channels(resnet()))
    assert text.splitlines() == [
        "26 channels of 3 layers can go.",
        "Whole: 0.0, 1.conv2, 2.conv2, 2.shortcut.0, 3.conv2, because they are added to others (a "
        "residual stream).",
    ]
