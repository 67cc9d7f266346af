"""Values that go round layers cross the edges of stages, with their gradients, and no others do."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.pipeline.crossing import message
from lightning_axosparse.pipeline.crossing.message import Activation
from lightning_axosparse.pipeline.joining import sent_tensors
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from tests.pipeline.test_pipeline import (
    Known,
    by_parts,
    evaluate,
    given,
    learned,
    pipeline,
    run,
    running_stage,
    train,
    training,
)

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


def changed_in_place(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The statements return nothing that has a name."""
    kept = layers[0](x).clone()
    kept.mul_(2)
    x = layers[1](kept) + 0
    x[:, 0] = x[:, 1]
    functional.relu(x, inplace=True)
    return chain(layers[2:], x) + kept


def written_to(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """A tensor that all stages make, and that gets outputs of layers."""
    sums, states = torch.zeros_like(x), torch.zeros(len(x), 3, WIDTH, dtype=x.dtype)
    for index, layer in enumerate(layers):
        x = layer(x)
        if index < 3:
            states[:, index] = x
            sums.add_(x)
    return x + states.sum(1) * sums


def kept_for_nothing(layers: nn.ModuleList, x: Tensor) -> Tensor:
    states = []
    for layer in layers:
        x = layer(x)
        states.append((x, x.detach().cpu()))
        KEPT.append(x)
    assert len(states) == len(layers)
    return x


KEPT: list[Tensor] = []
"""What refers to tensors and reads none, as a debugger or the frame of an exception does."""


def by_value(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """What the step does depends on numbers, which are alike for all samples."""
    x = layers[0](x)
    small = x.abs() <= 1
    scale = 2.0 if small.all().item() else 0.5
    return chain(layers[1:], x * scale) + scale * x[small].view_as(x)


SKIPPING = [
    *(residual, residual_in_place, u_net, encoder, all_states, halves, gated, narrower),
    *(changed_in_place, written_to, kept_for_nothing, by_value),
]


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(6)
    )


@pytest.mark.parametrize("stages", [2, 6])
@pytest.mark.parametrize("network", [chain, *SKIPPING])
@pytest.mark.parametrize("is_known", [True, False])
def test_values_and_gradients_are_those_of_one_process(
    network: Network, stages: int, is_known: bool
) -> None:
    ours, theirs = layers(), layers()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    network(theirs, x).pow(2).mean().backward()
    pipe, dealt = pipeline(ours, stages)
    step = lambda batch: network(ours, batch).pow(2).mean()  # noqa: E731
    known = learned(pipe, step, x, MICROBATCHES) if is_known else Known()
    train(pipe, step, x, MICROBATCHES, known)
    for evaluating in (torch.no_grad, torch.inference_mode):
        with evaluating():
            output = evaluate(pipe, lambda batch: network(ours, batch), x, 1, known)
            torch.testing.assert_close(output, network(theirs, x), rtol=0, atol=1e-14)
    dealt.uninstall()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("network", "most"),
    [
        (chain, 1),
        (residual, 1),
        (residual_in_place, 2),
        (u_net, 3),
        (encoder, 2),
        (gated, 2),
        (changed_in_place, 2),
        (written_to, 3),
        (kept_for_nothing, 1),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_no_later_stage_reads_is_not_sent(
    network: Network, most: int, trains: bool, sent: list[Activation]
) -> None:
    ours = layers()
    pipe, dealt = pipeline(ours, 6)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    step = lambda batch: network(ours, batch).pow(2).mean()  # noqa: E731
    with torch.set_grad_enabled(trains):
        known = learned(pipe, step, x, MICROBATCHES)
        sent.clear()
        (train if trains else evaluate)(pipe, step, x, MICROBATCHES, known)
    dealt.uninstall()
    counts = [len(sent_tensors(message)) for message in sent]
    assert len(counts) == 5 * MICROBATCHES
    assert max(counts) == most


def test_nothing_is_computed_from_placeholders() -> None:
    calls = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # Backward passes call it with larger matrices.
            if func is torch.ops.aten.linalg_matrix_exp.default and args[0].shape[-1] == 2:
                with torch._C.DisableTorchFunctionSubclass():
                    if args[0].device.type == "cpu":
                        calls.append(args[0].isnan().any().item())
            return func(*args, **(kwargs or {}))

    def between(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.matrix_exp(layer(x)[:, None, :2].expand(-1, 2, 2)).mean(1)
            x = torch.cat([x, x, x], -1)
        return x

    ours = layers()
    pipe, dealt = pipeline(ours, 3)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    step = lambda batch: between(ours, batch).mean()  # noqa: E731
    known = learned(pipe, step, x, 1)
    with Counted():
        train(pipe, step, x, 1, known)
    dealt.uninstall()
    assert calls == [False] * 6  # once a layer: on the layer's stage, and at the end of the step


def test_running_statistics_between_layers_are_refused_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = layers(), nn.BatchNorm1d(WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.layers[0](x))
            return chain(self.layers[1:], x)

    net = Net()
    pipe, dealt = pipeline(net.layers, 3, module=net)
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


@pytest.mark.parametrize(("last", "user"), [(6, "The end of the step"), (5, "Stage 2")])
def test_what_cannot_be_followed_is_refused(last: int, user: str) -> None:
    ours = layers()
    pipe, dealt = pipeline(ours, 3)
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        kept = Twice.apply(ours[0](x))
        return chain(ours[last:], chain(ours[1:last], kept) + kept).mean()

    known = learned(pipe, step, batch, MICROBATCHES)
    words = f"{user} uses the output of layer 'layers.0' in a way that could not be followed"
    with pytest.raises(MisconfigurationException, match=words):
        train(pipe, step, batch, MICROBATCHES, known)
    dealt.uninstall()


READS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "an output": (lambda first, made: first.mean(), "the output of layer 'layers.0'"),
    "a result": (lambda first, made: made.mean(), "a value that the step computes from the output"),
    "a view": (lambda first, made: first.T.mean(), "the output of layer 'layers.0'"),
    "a number": (lambda first, made: float(made[0, 0]), "a value that the step computes from"),
    "numpy": (lambda first, made: first.detach().numpy().mean(), "the output of layer"),
    "a list of tensors": (lambda first, made: torch.stack([made, first]).sum(), "a value that"),
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("trains", [True, False])
def test_a_batch_that_reads_a_value_for_the_first_time_runs_again(what: str, trains: bool) -> None:
    ours, reads = layers(), False
    read, words = READS[what]

    def step(x: Tensor) -> Tensor:
        first = ours[0](x)
        made = first.exp()
        x = chain(ours[1:], first).mean()
        return x + read(first, made) if reads else x

    pipe, dealt = pipeline(ours, 3)
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    go = train if trains else evaluate
    with torch.set_grad_enabled(trains):
        known = learned(pipe, step, batch, MICROBATCHES)
        go(pipe, step, batch, MICROBATCHES, known)
        reads = True
        if trains:
            last = run(pipe, replace(training(pipe, step, batch, MICROBATCHES), **known._asdict()))
            assert last.rerun is Rerun.READS
        with torch.no_grad(), pytest.raises(RunAgain) as raised:
            evaluate(pipe, step, batch, MICROBATCHES, known)
        assert raised.value.why is Rerun.READS
        assert re.search(f"reads {words}", str(raised.value.__cause__))
        value = go(pipe, step, batch, MICROBATCHES, learned(pipe, step, batch, MICROBATCHES))
    dealt.uninstall()
    assert value == pytest.approx(step(batch).item(), abs=1e-12)


@pytest.mark.parametrize("parted", [True, False])
def test_a_layer_that_is_given_a_value_for_the_first_time_runs_the_batch_again(
    parted: bool,
) -> None:
    """The stages behind it compute nothing, and their gradients do not count."""
    ours, reads = layers(), False

    def step(x: Tensor) -> Tensor:
        first = ours[0](x)
        x = chain(ours[1:3], first)
        return chain(ours[3:], x + first if reads else x).mean()

    pipe, dealt = pipeline(ours, 6)
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    known = learned(pipe, step, batch, MICROBATCHES)
    reads = True
    given = replace(training(pipe, step, batch, MICROBATCHES), **known._asdict())
    last = run(pipe, given, by_parts() if parted else None)
    assert last.rerun is Rerun.READS
    dealt.uninstall()


def test_placeholders_tell_what_they_are_and_can_be_copied() -> None:
    ours, kept = layers(), []

    def step(x: Tensor) -> Tensor:
        kept.clear()
        for layer in ours:
            x = layer(x)
            kept.append(x)
        del kept[1:]
        return x.mean()

    pipe, dealt = pipeline(ours, 3)
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    train(pipe, step, batch, MICROBATCHES, learned(pipe, step, batch, MICROBATCHES))
    dealt.uninstall()
    for copied in (kept[0], copy.deepcopy(kept)[0], pickle.loads(pickle.dumps(kept[0]))):
        assert repr(copied) == "<placeholder: the output of layer 'layers.0'>"
        assert copied.shape == (BATCH, WIDTH)
        assert copied.dtype == torch.float64
        with pytest.raises(MisconfigurationException, match=r"reads the output of layer"):
            copied.sum()


def test_no_stage_waits_for_one_that_fails() -> None:
    ours = layers()
    pipe, dealt = pipeline(ours, 3)
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        if running_stage(dealt) == 1:
            raise ZeroDivisionError("of the user")
        return chain(ours, x)

    assert message.crossing_of(pipe.probe(given(pipe, step, batch, MICROBATCHES))) is None
    step = lambda x: chain(ours, x)  # noqa: E731
    evaluate(pipe, step, batch, MICROBATCHES, learned(pipe, step, batch, MICROBATCHES))
    dealt.uninstall()


def test_following_a_chain_takes_no_function_mode() -> None:
    ours, modes = layers(), []

    def step(x: Tensor) -> Tensor:
        modes.append(torch.overrides._get_current_function_mode())
        x = chain(ours, x)
        modes.append(torch.overrides._get_current_function_mode())
        return x

    pipe, dealt = pipeline(ours, 3)
    batch = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    known = learned(pipe, step, batch, 1)
    modes.clear()
    with torch.no_grad():
        evaluate(pipe, step, batch, 1, known)
    dealt.uninstall()
    # Begun by three stages and by the end of the step, which ends it.
    assert modes == [None] * 5


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
    known = learned(pipe, lambda batch: network(batch).mean(), x, MICROBATCHES)
    sent.clear()
    train(pipe, lambda batch: network(batch).mean(), x, MICROBATCHES, known)
    dealt.uninstall()
    counts = [len(sent_tensors(message)) for message in sent]
    assert counts == [1] * 2 * MICROBATCHES
