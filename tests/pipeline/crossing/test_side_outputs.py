"""Hooks and attributes of layers of earlier stages are followed, and nothing else is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_axosparse.pipeline.crossing.message import Activation, encode
from lightning_axosparse.pipeline.crossing.side_outputs import WatchedLayer
from lightning_axosparse.pipeline.joining import sent_tensors
from lightning_axosparse.pipeline.pipeline import Pipeline
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.support.object_trees import object_leaves
from tests.pipeline.test_pipeline import evaluate, learned, pipeline, run, train, training

WIDTH, LAYERS = 6, 4


@dataclass
class Opened:
    """An output that is no pytree."""

    value: Tensor


@dataclass
class Locked(Opened):
    """An output that cannot be pickled."""

    lock: Any = field(default_factory=threading.Lock)


class Wrap(nn.Module):
    def forward(self, x: Tensor) -> Opened:
        return Opened(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.wrap = nn.Linear(WIDTH, WIDTH), nn.Tanh(), Wrap()
        self.seen: Any = 0.0
        self.register_buffer("level", torch.zeros(()))
        self.tell: Callable[[Layer, Tensor], None] = lambda layer, x: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.wrap(self.act(self.linear(x))).value
        self.tell(self, x)
        return x


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


@contextmanager
def staged(model: nn.Sequential, stages: int = 3) -> Iterator[Pipeline]:
    pipe, dealt = pipeline(model, stages)
    yield pipe
    dealt.uninstall()


def assert_as_on_one_process(
    prepare: Callable[[nn.Sequential], Callable[[Tensor], Tensor]],
) -> None:
    """Compare gradients of a loss, and its value in evaluation.

    Args:
        prepare: adds hooks to a network and makes the loss.
    """
    model, reference = network(), network()
    loss, expected = prepare(model), prepare(reference)
    batch = torch.randn(6, WIDTH)
    expected(batch).backward()
    with torch.no_grad():
        value = expected(batch)
    with staged(model) as pipe:
        known = learned(pipe, loss, batch, 2)
        train(pipe, loss, batch, 2, known)
        with torch.no_grad():
            output = evaluate(pipe, loss, batch, 2, known)
    torch.testing.assert_close(output, value)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def train_as_learned(
    pipe: Pipeline, step: Callable[[Tensor], Tensor], batch: Tensor, sent: list[Activation]
) -> None:
    """Train with two micro-batches, and note only what those send."""
    known = learned(pipe, step, batch, 2)
    sent.clear()
    train(pipe, step, batch, 2, known)


def sizes(message: Activation) -> int:
    return sum(tensor.nbytes for tensor in sent_tensors(message))


def test_a_network_without_hooks_sends_its_activation_alone(sent: list[Activation]) -> None:
    model = network()
    with staged(model) as pipe:
        train_as_learned(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), sent)
    assert len(sent) == 4
    for message in sent:
        header, block, _ = encode(message, torch.device("cpu"))
        bare, same, _ = encode(message.output, torch.device("cpu"))
        assert torch.equal(block, same)
        assert len(header) <= len(bare) + 100


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, args, output: print(output.shape, args[0].dtype),
        lambda module, args, output: output * torch.sigmoid(output.detach().mean() * 0),
        lambda module, args, output: (output,)[0],
    ],
)
def test_a_hook_that_leaves_nothing_behind_sends_nothing(hook: Any, sent: list[Activation]) -> None:
    model = network()
    for layer in model:
        layer.act.register_forward_hook(hook)
        layer.register_forward_hook(hook)
    with staged(model) as pipe:
        train_as_learned(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), sent)
    assert [message.side_outputs for message in sent] == [()] * 4


def test_a_number_that_a_hook_reads_reaches_the_loss() -> None:
    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        numbers: list[float] = []
        for layer in model:
            layer.act.register_forward_hook(
                lambda module, args, output: numbers.append(float(output.detach().mean()))
            )

        def loss(x: Tensor) -> Tensor:
            numbers.clear()
            y = model(x).mean()
            return y + sum(n * (i + 1) for i, n in enumerate(numbers))

        return loss

    assert_as_on_one_process(prepare)


def test_what_hooks_keep_and_no_stage_reads_adds_no_tensor(sent: list[Activation]) -> None:
    """The hooks are called again, as a list has to have as many entries as on one process."""
    model, kept = network(), []
    for layer in model:
        layer.act.register_forward_hook(lambda module, args, output: kept.append(output))

    def step(x: Tensor) -> Tensor:
        kept.clear()
        y = model(x).sum()
        assert len(kept) == LAYERS
        return y

    with staged(model) as pipe:
        train_as_learned(pipe, step, torch.randn(6, WIDTH), sent)
    assert {sizes(message) for message in sent} == {3 * WIDTH * 4}
    assert {len(message.side_outputs) for message in sent} == {1, 2}


def test_what_a_hook_keeps_on_the_module_is_sent(sent: list[Activation]) -> None:
    """Code that runs after the step may read it."""
    model = network()
    for layer in model:
        layer.act.register_forward_hook(lambda m, args, output: model[3].seen.append(output))

    def step(x: Tensor) -> Tensor:
        model[3].seen = []
        return model(x).sum()

    with staged(model) as pipe:
        train_as_learned(pipe, step, torch.randn(6, WIDTH), sent)
        assert not any(tensor.isnan().any() for tensor in model[3].seen)
    assert len(model[3].seen) == LAYERS
    assert {sizes(message) for message in sent[:2]} == {2 * 3 * WIDTH * 4}


def test_hooks_that_begin_to_keep_something_are_followed() -> None:
    model, reference = network(), network()
    kept: list[Tensor] = []

    def loss(model: nn.Sequential, x: Tensor) -> Tensor:
        kept.clear()
        return model(x).mean() + sum(each.mean() for each in kept)

    batch = torch.randn(6, WIDTH)
    with staged(model) as pipe:
        step = lambda x: loss(model, x)  # noqa: E731
        known = learned(pipe, step, batch, 2)
        for network_ in (model, reference):
            for layer in network_:
                layer.act.register_forward_hook(lambda m, args, output: kept.append(output.exp()))
        value = train(pipe, step, batch, 2, known)
    torch.testing.assert_close(value, loss(reference, batch).detach().float())


KEEP: dict[str, Callable[[list[Any], Any, Tensor], Any]] = {
    "the output": lambda kept, args, output: kept.append(output),
    "the output in what it was given": lambda kept, args, output: kept.append((args, output)),
    "a view": lambda kept, args, output: kept.append(output[:, 1]),
    "a function": lambda kept, args, output: kept.append(output.sum()),
    "a function, besides a change": lambda kept, args, output: (
        kept.append(output.pow(2)),
        output * 2,
    )[1],
    "the output, returned": lambda kept, args, output: (kept.append(output), output)[1],
    "the input": lambda kept, args, output: kept.append(args[0].exp()),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("what", KEEP)
def test_what_a_hook_keeps_is_sent(what: str, inside: bool) -> None:
    """Also what a hook of a layer keeps, behind one that changes the output."""

    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        kept: list[Any] = []
        for layer in model:
            module = layer.act if inside else layer
            if not inside:
                layer.register_forward_hook(lambda m, args, output: output + 1)
            module.register_forward_hook(lambda m, args, output: KEEP[what](kept, args, output))

        def loss(x: Tensor) -> Tensor:
            kept.clear()
            y = model(x)
            assert len(kept) == LAYERS
            leaves = object_leaves(kept, Tensor)
            return y.mean() + sum(t.mean() * (i + 1) for i, t in enumerate(leaves))

        return loss

    assert_as_on_one_process(prepare)


def test_hooks_are_the_users_own_after_a_step_and_after_an_error() -> None:
    model = network()
    kept: list[Tensor] = []
    hook = lambda module, args, output: kept.append(output)  # noqa: E731
    handles = [layer.act.register_forward_hook(hook) for layer in model]
    handles += [layer.register_forward_hook(hook) for layer in model]
    with staged(model) as pipe:
        train(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), 2)
        model[1].tell = lambda layer, x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            train(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), 2)
    for layer in model:
        assert list(layer.act._forward_hooks.values()) == [hook]
        assert list(layer._forward_hooks.values()) == [hook]
    for handle in handles:
        handle.remove()
    assert not any(layer.act._forward_hooks or layer._forward_hooks for layer in model)


def test_an_object_that_cannot_be_sent_is_refused_by_name() -> None:
    model = network()
    kept: list[Tensor] = []
    for layer in model:
        layer.wrap.forward = Locked
        layer.wrap.register_forward_hook(lambda m, args, output: kept.append(output.value))
    words = r"hook of 'layers\.0\.wrap'.*wants an object of type 'Locked'"
    with staged(model) as pipe, pytest.raises(MisconfigurationException, match=words):
        train(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), 2)


def set_attribute(layer: Layer, x: Tensor) -> None:
    layer.seen = x.pow(2).mean()


def set_buffer(layer: Layer, x: Tensor) -> None:
    layer.level = x.pow(2).mean()


def add_in_place(layer: Layer, x: Tensor) -> None:
    layer.seen += x.pow(2).mean()


@pytest.mark.parametrize("tell", [set_attribute, set_buffer, add_in_place])
def test_an_attribute_that_a_layer_sets_is_sent(tell: Callable[[Layer, Tensor], None]) -> None:
    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        for layer in model:
            layer.tell = tell

        def loss(x: Tensor) -> Tensor:
            for layer in model:
                layer.seen = torch.zeros(())
            y = model(x).mean()
            return y + sum((m.seen + m.level) * (i + 1) for i, m in enumerate(model))

        return loss

    assert_as_on_one_process(prepare)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_layers_append_to_a_list_is_sent_once(when: str) -> None:
    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        shared: list[Tensor] = []
        for layer in model:
            layer.seen = layer.act.seen = shared
            layer.tell = lambda layer, x: layer.seen.append(x.pow(2).mean())

        def loss(x: Tensor) -> Tensor:
            if when == "before":
                shared.clear()
            y = model(x).mean()
            assert len(shared) == LAYERS
            y = y + sum(seen * (i + 1) for i, seen in enumerate(shared))
            if when == "after":
                shared.clear()
            return y

        return loss

    assert_as_on_one_process(prepare)


def test_values_of_a_dict_are_sent() -> None:
    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        shared: dict[Any, Tensor] = {}
        for index, layer in enumerate(model):
            layer.seen = shared
            layer.tell = lambda layer, x, index=index: shared.update({index: x.pow(2).mean()})

        def loss(x: Tensor) -> Tensor:
            shared.clear()
            y = model(x).mean()
            return y + sum(shared[index] * (index + 1) for index in range(LAYERS))

        return loss

    assert_as_on_one_process(prepare)


def test_a_hook_with_keyword_arguments_is_followed() -> None:
    class Named(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(input=self.linear(input=x))

    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        kept: list[Tensor] = []
        for index in range(LAYERS):
            torch.manual_seed(index)
            model[index] = Named()
            model[index].act.register_forward_hook(
                lambda module, args, kwargs, output: kept.append(kwargs["input"] * output),
                with_kwargs=True,
            )
            model[index].act.register_forward_pre_hook(
                lambda module, args, kwargs: kept.append(kwargs["input"]), with_kwargs=True
            )

        def loss(x: Tensor) -> Tensor:
            kept.clear()
            y = model(x).mean()
            assert len(kept) == 2 * LAYERS
            return y + sum(t.mean() * (i + 1) for i, t in enumerate(kept))

        return loss

    assert_as_on_one_process(prepare)


def test_a_module_that_layers_share_is_followed_in_each(sent: list[Activation]) -> None:
    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        kept: list[Tensor] = []
        for layer in model:
            layer.act = model[0].act
        model[0].act.register_forward_hook(lambda module, args, output: kept.append(output))

        def loss(x: Tensor) -> Tensor:
            kept.clear()
            y = model(x).mean()
            assert len(kept) == LAYERS
            return y + sum(t.mean() * (i + 1) for i, t in enumerate(kept))

        return loss

    assert_as_on_one_process(prepare)
    assert {len(message.side_outputs) for message in sent} == {1, 2}


def setting_maps(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    for layer in model:
        layer.tell = lambda layer, x: setattr(layer, "seen", x[:, :, None] * x[:, None])
    return lambda x: model(x).mean() + sum(layer.seen.mean() for layer in model)


def test_an_attribute_as_large_as_attentions_is_sent_where_it_is_read(
    sent: list[Activation],
) -> None:
    model = network()
    reading, batch = setting_maps(model), torch.randn(6, WIDTH)
    plain = lambda x: model(x).sum()  # noqa: E731
    with staged(model) as pipe:
        train_as_learned(pipe, plain, batch, sent)
        assert {sizes(message) for message in sent} == {3 * WIDTH * 4}
        known = learned(pipe, plain, batch, 2)
        last = run(pipe, replace(training(pipe, reading, batch, 2), **known._asdict()))
        assert last.rerun is Rerun.READS
        with pytest.raises(RunAgain) as raised:
            evaluate(pipe, reading, batch, 2, known)
        assert "'layers.0.seen', which a layer sets" in str(raised.value.__cause__)
    assert_as_on_one_process(setting_maps)


def test_hooks_in_a_compiled_layer_are_warned_of() -> None:
    model = network()
    model[0].compile(backend="eager")
    model[0].act.register_forward_hook(lambda module, args, output: None)
    with staged(model) as pipe, pytest.warns(match=r"'layers\.0\.act' has forward hooks"):
        train(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), 1)


def test_hooks_of_all_modules_are_warned_of() -> None:
    model = network()
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with staged(model) as pipe, pytest.warns(match="hooks of all modules"):
            train(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), 1)
    finally:
        handle.remove()


def test_scripted_layers_send_their_activation_alone(sent: list[Activation]) -> None:
    model = nn.Sequential(*(torch.jit.script(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)))
    with staged(model) as pipe:
        train_as_learned(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), sent)
    assert [message.side_outputs for message in sent] == [()] * 4


def test_an_attribute_that_a_compiled_layer_sets_is_sent() -> None:
    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        for layer in model:
            layer.tell = set_attribute
            layer.compile(backend="eager")
        return lambda x: model(x).mean() + sum(m.seen * (i + 1) for i, m in enumerate(model))

    assert_as_on_one_process(prepare)


def test_a_watched_layer_sees_an_attribute_in_the_place_of_another() -> None:
    layer = Layer()
    layer.one = torch.ones(1)
    watched = WatchedLayer("layer", layer)
    assert {name for _, name in watched.attributes()} >= {"one"}
    del layer.one
    layer.other = torch.ones(1)
    assert {name for _, name in watched.attributes()} >= {"other"}


class Halving(Layer):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


def test_an_input_that_the_first_layer_changes_is_sent() -> None:
    def prepare(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
        model[0] = halving = Halving()
        halving.load_state_dict(model[1].state_dict())

        def loss(x: Tensor) -> Tensor:
            given = x = x * 3
            return (model(x) * given).sum()

        return loss

    assert_as_on_one_process(prepare)


def test_an_input_that_a_layer_changes_and_no_stage_reads_is_not_sent(
    sent: list[Activation],
) -> None:
    model = nn.Sequential(
        *(layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)))
    )
    with staged(model, 4) as pipe:
        train_as_learned(pipe, lambda x: model(x).sum(), torch.randn(6, WIDTH), sent)
    assert [len(message.side_outputs) for message in sent] == [0] * len(sent)


def test_a_change_of_an_output_that_the_layer_before_stores_is_refused() -> None:
    class Storing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.output = super().forward(x)
            return self.output

    model = nn.Sequential(*(Storing() for _ in range(LAYERS - 1)), nn.ReLU(inplace=True))

    def loss(x: Tensor) -> Tensor:
        return model(x).sum() + sum(layer.output.sum() for layer in list(model)[:-1])

    with (
        staged(model, LAYERS) as pipe,
        pytest.raises(MisconfigurationException, match=r"in place, and 'layers.2.output'"),
    ):
        learned(pipe, loss, torch.randn(6, WIDTH), 2)
