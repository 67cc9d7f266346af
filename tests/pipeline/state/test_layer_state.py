"""What layers count, they count once a batch, however many micro-batches it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.state.layer_state import LayerState
from lightning_axosparse.pipeline.state.module_state import AttributePath
from lightning_axosparse.pipeline.state.values import copied, same

PARTS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("u", torch.ones(2))
        self.calls, self.log, self.total = 0, ["begin"], torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.u.mul_(2)
        self.log.append(self.calls)
        self.made = torch.full((2,), float(self.calls))
        return x * self.u


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])


def place(layer: int, name: str) -> AttributePath:
    return AttributePath(((".", "layers"), (".", str(layer))), name)


NAMES = ("calls", "u", "log", "made")


def counted_state() -> tuple[Stages, LayerState]:
    module = Stages()
    state = LayerState(module)
    state.learn([(place(stage, name), stage) for stage in range(2) for name in NAMES])
    return module, state


def run_batch(
    module: Stages, state: LayerState, each: Callable[[Layer, int], Any] = lambda layer, n: None
) -> list[str]:
    state.begin_batch()
    for number in range(PARTS):
        for stage, layer in enumerate(module.layers):
            with state.of_pass(stage):
                layer(torch.ones(2))
                each(layer, number)
    return state.end_batch()


def test_every_micro_batch_finds_what_the_batch_would_find() -> None:
    (module, state), reference = counted_state(), Layer()
    buffer, log = module.layers[0].u, module.layers[0].log
    for batch in (1, 2):
        seen: list[Any] = []
        each = lambda layer, n, seen=seen: seen.append((layer.calls, layer.u.clone()))  # noqa: E731
        assert run_batch(module, state, each) == []
        reference(torch.ones(2))
        assert same(seen, [(batch, torch.full((2,), 2.0**batch))] * 2 * PARTS)
        for layer in module.layers:
            assert all(same(getattr(layer, name), getattr(reference, name)) for name in NAMES)
    assert module.layers[0].u is buffer, "others may hold it"
    assert module.layers[0].log is log
    assert "u" in module.layers[0]._buffers


def test_what_was_not_learned_changes_with_every_micro_batch() -> None:
    module, state = counted_state()
    run_batch(module, state, lambda layer, n: layer.total.add_(1))
    assert [layer.total.tolist() for layer in module.layers] == [[PARTS, PARTS]] * 2


def test_runs_through_no_stage_or_another_one_change_nothing() -> None:
    module, state = counted_state()
    state.begin_batch()
    for stage in (None, 1):
        with state.of_pass(stage):
            module.layers[0](torch.ones(2))
            assert module.layers[0].calls == 1
        assert module.layers[0].calls == 0
        assert not hasattr(module.layers[0], "made")
    state.end_batch()
    assert module.layers[0].calls == 0
    assert module.layers[0].u.tolist() == [1, 1]


def test_what_depends_on_the_samples_is_warned_of_and_the_last_one_stays() -> None:
    module, state = counted_state()

    def each(layer: Layer, number: int) -> None:
        if layer is module.layers[1]:
            layer.calls += number

    (warning,) = run_batch(module, state, each)
    assert "`self.layers[1].calls` by what is in its samples" in warning
    assert [layer.calls for layer in module.layers] == [1, PARTS]


def test_what_fails_leaves_layers_as_they_were() -> None:
    module, state = counted_state()
    state.begin_batch()

    def failing() -> None:
        with state.of_pass(0):
            module.layers[0](torch.ones(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert (module.layers[0].calls, module.layers[0].log) == (0, ["begin"])


def test_a_layer_that_is_computed_again_reads_what_it_has_read() -> None:
    module, state = counted_state()
    layer = module.layers[0]
    state.begin_batch()
    with state.of_pass(0):
        remembered = state.remember(layer)
        expected = layer(torch.ones(2))
    state.end_batch()
    after = layer.calls, layer.u.clone()
    with remembered():
        assert not hasattr(layer, "made")
        again = layer(torch.ones(2))
    assert torch.equal(again, expected)
    assert same((layer.calls, layer.u), after)


def test_parameters_that_every_pass_sets_to_the_same_can_be_differentiated() -> None:
    """As a layer does that masks its weights before it uses them."""
    module = Stages()
    state, weight = LayerState(module), module.layers[0].weight
    state.learn([], [(place(0, "weight"), 0)])
    x, mask = torch.ones(2, requires_grad=True), torch.tensor([1.0, 0.0])

    def masked() -> Tensor:
        with torch.no_grad():
            weight.mul_(mask)
        return (x * weight).sum()

    for _ in range(2):
        state.begin_batch()
        outputs = []
        for _ in range(2):
            with state.of_pass(0):
                outputs.append(masked())
        x.grad = None
        for output in outputs:
            output.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 0]
    with state.of_pass(0):
        output = masked()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_a_copy_keeps_what_it_is() -> None:
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.full_shape = (4,)
    copy = copied(parameter)
    assert type(copy) is nn.Parameter
    assert (copy.full_shape, copy.requires_grad) == ((4,), False)
    copy.add_(1)
    assert parameter.tolist() == [1, 1]
    of_graph = torch.ones(2, requires_grad=True) * 2
    assert copied(of_graph) is of_graph
    items = [torch.ones(1)]
    copied(items).append(1)
    assert len(items) == 1


def test_a_batch_that_runs_again_finds_the_buffers_from_before_it() -> None:
    module = Stages()
    state, layer = LayerState(module), module.layers[0]
    buffer = layer.u

    def run(replaces: bool) -> None:
        state.begin_batch()
        layer.u.mul_(2)
        if replaces:
            layer.u = layer.u + 1

    run(True)
    run(False)
    assert layer.u is buffer
    assert layer.u.tolist() == [2, 2]
    state.end_batch()
    run(False)
    assert layer.u.tolist() == [4, 4], "a batch that has ended stays"
