"""Values that go round layers cross the edges of stages, with their gradients, and no others do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.pipeline.message import tensors
from lightning_axosparse.pipeline.microbatch import split
from lightning_axosparse.pipeline.p2p import LoopbackLink
from lightning_axosparse.pipeline.side_outputs import Activation
from tests.pipeline.test_engine import evaluate, pipeline, train

WIDTH, BATCH, MICROBATCHES = 6, 4, 2
Network = Callable[[nn.ModuleList, Tensor], Tensor]


def chain(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def residual(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = x * 2
    for layer in layers:
        x = x + layer(x)
    return x


def residual_in_place(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = x * 2
    for layer in layers:
        x += layer(x.clone())
    return x


def u_net(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first, second, third, *_ = layers
    down = first(x)
    deeper = second(down)
    up = layers[3](third(functional.gelu(deeper)) + deeper)
    return layers[5](layers[4](torch.stack([up, down]).sum(0)) * down.sigmoid())


def encoder(layers: nn.ModuleList, x: Tensor) -> Tensor:
    states = layers[1](layers[0](x))
    y = torch.ones_like(x)
    for layer in layers[2:]:
        y = y * states.softmax(-1)
        y = layer(y)
    return y


def all_states(layers: nn.ModuleList, x: Tensor) -> Tensor:
    states = []
    for layer in layers:
        x = layer(x)
        states.append(x)
    return torch.stack(states).mean(0)


def halves(layers: nn.ModuleList, x: Tensor) -> Tensor:
    left, right = layers[0](x).chunk(2, -1)
    for layer in layers[1:]:
        x = layer(torch.cat([right, left], -1))
        left, right = left + x[:, :3], x[:, 3:]
    return torch.cat([left, right], -1)


def gated(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = layers[0](x)
    mask = x > 0
    for layer in layers[1:]:
        x = torch.where(mask, layer(x), x.detach())
    return x


def narrower(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Shapes differ from layer to layer, and code between them needs them."""
    x = layers[0](x)
    wide = torch.cat([x, x, x], 0).unflatten(0, (3, len(x))).amax(0)
    for layer in layers[1:]:
        wide = layer(wide).view(-1, 2, WIDTH // 2).flatten(1)
    return wide + x


SKIPPING = [residual, residual_in_place, u_net, encoder, all_states, halves, gated, narrower]


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(6)
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Activation]]:
    """The activations that have been sent between stages."""
    messages: list[Activation] = []
    send = LoopbackLink.send_activation

    def record(link: LoopbackLink, tree: Any) -> None:
        messages.append(copy.copy(tree))
        send(link, tree)

    monkeypatch.setattr(LoopbackLink, "send_activation", record)
    return messages


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("network", [chain, *SKIPPING])
def test_values_and_gradients_are_those_of_one_process(network: Network, stages: int) -> None:
    ours, theirs = layers(), layers()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    for part in split(x, MICROBATCHES):
        (network(theirs, part.batch).pow(2).mean() * part.weight).backward()
    pipe, dealt = pipeline(ours, stages)
    train(pipe, lambda batch: network(ours, batch).pow(2).mean(), x, MICROBATCHES)
    with torch.no_grad():
        (output,) = evaluate(pipe, lambda batch: network(ours, batch), x, 1)
    dealt.uninstall()
    torch.testing.assert_close(output, network(theirs, x), rtol=0, atol=1e-14)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("network", "most"), [(chain, 1), (residual, 1), (u_net, 4), (encoder, 2), (gated, 2)]
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_no_name_refers_to_is_not_sent(
    network: Network, most: int, trains: bool, sent: list[Activation]
) -> None:
    ours = layers()
    pipe, dealt = pipeline(ours, 6)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    if trains:
        train(pipe, lambda batch: network(ours, batch).pow(2).mean(), x, MICROBATCHES)
    else:
        with torch.no_grad():
            evaluate(pipe, lambda batch: network(ours, batch), x, MICROBATCHES)
    dealt.uninstall()
    counts = [sum(tensor is not None for tensor in tensors(message)) for message in sent]
    assert len(counts) == 5 * MICROBATCHES
    assert max(counts) == most


def test_nothing_is_computed_from_placeholders() -> None:
    calls = []

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.matrix_exp and args[0].device.type == "cpu":
                calls.append(args[0].isnan().any().item())
            return func(*args, **(kwargs or {}))

    def between(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.matrix_exp(layer(x)[:, None, :2].expand(-1, 2, 2)).mean(1)
            x = torch.cat([x, x, x], -1)
        return x

    ours = layers()
    pipe, dealt = pipeline(ours, 3)
    with Counted():
        train(
            pipe,
            lambda batch: between(ours, batch).mean(),
            torch.randn(BATCH, WIDTH, dtype=torch.float64),
            1,
        )
    dealt.uninstall()
    assert calls == [False] * 6  # once a layer, on the layer's stage


def test_running_statistics_between_layers_are_refused_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = layers(), nn.BatchNorm1d(WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.layers[0](x))
            return chain(self.layers[1:], x)

    net = Net()
    pipe, dealt = pipeline(net.layers, 3, buffers=net.named_buffers())
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    with pytest.raises(MisconfigurationException, match=r"'norm.running_mean' changes between"):
        train(pipe, lambda part: net(part).mean(), batch, MICROBATCHES)
    dealt.uninstall()


class Twice(torch.autograd.Function):
    """What no function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def through_a_function(layers: nn.ModuleList, x: Tensor) -> Tensor:
    kept = Twice.apply(layers[0](x))
    return chain(layers[1:], kept) + kept


def changed_in_place(layers: nn.ModuleList, x: Tensor) -> Tensor:
    kept = layers[0](x).clone()
    kept.mul_(2)
    return chain(layers[1:], kept) + kept


@pytest.mark.parametrize("network", [through_a_function, changed_in_place])
def test_what_cannot_be_followed_is_refused(network: Network) -> None:
    ours = layers()
    pipe, dealt = pipeline(ours, 3)
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    with pytest.raises(MisconfigurationException, match="could not be followed"):
        train(pipe, lambda part: network(ours, part).mean(), batch, MICROBATCHES)
    dealt.uninstall()


def test_activation_checkpointing_by_the_user_sends_the_activation_alone(
    sent: list[Activation],
) -> None:
    ours = layers()
    pipe, dealt = pipeline(ours, 3)

    def network(x: Tensor) -> Tensor:
        for layer in ours:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    for _ in range(2):
        train(pipe, lambda batch: network(batch).mean(), x, MICROBATCHES)
    dealt.uninstall()
    counts = [sum(tensor is not None for tensor in tensors(message)) for message in sent]
    assert counts[len(counts) // 2 :] == [1] * 2 * MICROBATCHES
