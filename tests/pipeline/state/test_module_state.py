"""Whatever a step changes on a module is found, named and put back."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_axosparse import sparsify
from lightning_axosparse.distributed.gradient_reducer import DividedGradient
from lightning_axosparse.pipeline.state.module_state import (
    AttributePath,
    ModuleState,
    namespace_of,
    owner_of,
    value_at,
    write,
)
from lightning_axosparse.pipeline.state.values import MISSING, copied, same

PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)
)
TENSORS = st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
ARRAYS = st.lists(st.integers(0, 9), max_size=3).map(np.array)
VALUES = st.recursive(
    PLAIN | TENSORS | ARRAYS | st.sets(st.integers(), max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


class Meter:
    """An average meter, as many examples have it; it knows itself, and has a lock."""

    def __init__(self) -> None:
        self.total, self.count, self.lock, self.me = 0.0, 0, threading.Lock(), self


@dataclass
class Best:
    loss: float = 1e9


class Module(L.LightningModule):
    """Holds what a step may change, and what it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"beta": 1.0})
        self.model = nn.Sequential(
            nn.Linear(2, 8),
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8), n_power_iterations=1),
            nn.BatchNorm1d(8),
        )
        self.again = self.model[0]
        self.register_buffer("average", torch.zeros(2))
        self.steps, self.metric, self.best = 0, MeanMetric(), Best()
        self.meters = {"loss": Meter()}
        self.counts, self.window = Counter("aab"), deque([1, 2], maxlen=3)
        self.items: list[Any] = [torch.ones(2), [1, 2]]
        self.items.append(self.items)
        self.array, self.seen, self.nan = np.zeros(3), {1}, float("nan")
        self.hidden = [nn.Linear(1, 1)]
        self.file, self.function = open("/dev/null"), lambda: 0  # noqa: SIM115
        self.loader = DataLoader(TensorDataset(torch.ones(2)))
        self.wide = torch.zeros(1).expand(4)

    @property
    def odd(self) -> int:
        raise AssertionError("a property is not read")


def places(changes: dict[AttributePath, Any]) -> set[str]:
    return {str(place) for place in changes}


def step(module: Module) -> None:
    module.steps += 1
    module.average += 1
    module.model[0].weight.data *= 2
    module.model(torch.ones(3, 2))
    module.meters["loss"].total += 0.5
    module.meters["accuracy"] = Meter()
    module.best.loss = 1.0
    module.counts.update("ac")
    module.window.extend([3, 4])
    module.items[0] += 1
    module.items[1].append(3)
    module.array[1] = 5
    module.seen.add(2)
    module.hidden[0].weight.data.zero_()
    module.hparams.beta = 0.5
    module.made = torch.ones(3)
    module.metric.update(1.0)
    del module.function


def rewound(state: ModuleState) -> dict[AttributePath, Any]:
    """Copies of what has changed, which is put back."""
    changes = {place: copied(value) for place, (_, value) in state.changes().items()}
    state.rewind()
    assert state.changes() == {}
    assert not state.rewind()
    return changes


def test_what_a_step_changes_is_named_and_put_back() -> None:
    torch.manual_seed(0)  # Of some weights the first iterations find the spectral norm to the bit.
    module = Module()
    before, held = copy.deepcopy(module.state_dict()), dict(vars(module))
    objects = [module.items, module.items[0], module.average, module.model[0].weight]
    version = module.model[0].weight._version
    norm = module.model[2].running_mean.clone()
    state = ModuleState(module)
    assert not state.rewind()
    with state.writes():
        step(module)
    of_average = module.average._version
    changes = rewound(state)
    assert places(changes) == {
        *("self.steps", "self.average", "self.meters", "self.best.loss", "self.counts"),
        *("self.window", "self.items", "self.array", "self.seen", "self.hidden[0].weight"),
        *("self._hparams", "self.made", "self.function", "self.meters['loss'].total"),
        *("self.model[0].weight", "self.model[1].parametrizations.weight[0]._u"),
        *("self.model[1].parametrizations.weight[0]._v", "self.model[2].num_batches_tracked"),
        *("self.model[2].running_mean", "self.model[2].running_var"),
    }
    assert changes[AttributePath((), "function")] is MISSING
    assert changes[AttributePath((), "counts")] == Counter("aaabc")
    assert value_at(module, AttributePath((), "counts")) == Counter("aab")
    assert value_at(module, AttributePath((), "made")) is MISSING
    assert objects[0] is module.items
    assert objects[1] is module.items[0]
    assert objects[2] is module.average
    assert objects[3] is module.model[0].weight
    assert module.items[2] is module.items
    assert version == module.model[0].weight._version
    assert of_average == module.average._version
    assert vars(module).keys() == held.keys()
    assert torch.equal(module.model[2].running_mean, norm)
    after = module.state_dict()
    others = {key for key in before if not key.startswith("metric")}
    assert all(torch.equal(before[key], after[key]) for key in others)
    assert module.metric.compute() == 1.0


def test_a_configuration_of_hydra_is_left_as_it_is() -> None:
    config = OmegaConf.create({"layers": [1, 2], "rate": "???", "inner": {"a": 1}})
    OmegaConf.set_struct(config, True)
    module = nn.Linear(2, 2)
    module.config, module.held = config, [config]
    state = ModuleState(module)
    module.count = 1
    assert rewound(state) == {AttributePath((), "count"): 1}
    assert module.config is module.held[0] is config
    assert config.layers == [1, 2]


def test_names_lead_back_to_the_values() -> None:
    module = Module()
    state = ModuleState(module)
    with state.writes():
        step(module)
    weight = module.model[0].weight.detach().clone()
    for place, value in rewound(state).items():
        namespace = namespace_of(owner_of(module, place), place.name)
        write(module, place, "changed", value)
        assert same(namespace.get(place.name, MISSING), value) or place.name == "items"
    assert torch.equal(module.model[0].weight, weight)
    assert module.meters["loss"].total == 0.5
    assert module.steps == 1
    assert owner_of(module, AttributePath((("[]", "gone"),), "x")) is None


def test_names_are_those_of_layers_too() -> None:
    module = nn.Sequential(nn.ModuleDict({"norm": nn.LayerNorm(2)}))
    module[0].norm.meters = [Meter()]
    state = ModuleState(module)
    module[0].norm.meters[0].count = 3
    (place,) = rewound(state)
    assert str(place) == "self[0].norm.meters[0].count"


def test_a_sparse_weight_is_put_back() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    sparsify(module, {"0.weight": torch.eye(4, dtype=torch.bool)})
    state = ModuleState(module)
    kept = next(p for p in module.parameters() if p.numel() == 4 and p.dim() == 1)
    before = kept.detach().clone()
    with state.writes():
        kept.data.mul_(2)
    assert len(rewound(state)) == 1
    assert torch.equal(kept, before)


def test_tensors_of_other_stages_and_divided_gradients_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    module.gradients = {"1.bias": DividedGradient(torch.ones(2), torch.Size([4]))}
    state = ModuleState(module)
    with state.writes():
        module[1].bias.data += 1
    assert places(rewound(state)) == {"self[1].bias"}


def test_a_buffer_that_is_replaced_or_deleted_is_put_back() -> None:
    module = Module()
    average, state = module.average, ModuleState(module)
    module.average = torch.ones(3)
    assert places(rewound(state)) == {"self.average"}
    assert module.average is average
    del module.average
    module.average = 3
    assert places(rewound(state)) == {"self.average"}
    assert module._buffers["average"] is average
    assert "average" not in vars(module)


def test_parameters_are_copied_when_something_writes_to_them() -> None:
    module = nn.Linear(64, 64)
    state, before = ModuleState(module), module.weight.detach().clone()
    held = [each for (each,) in state.storages.values()]
    for _ in range(2):
        assert [each.content for each in held] == [None, None]
        with state.writes():
            module.weight.data += 1
            module.bias.data += 1
        assert places(rewound(state)) == {"self.weight", "self.bias"}
        assert torch.equal(module.weight, before)


def test_some_layers_are_captured_by_themselves_and_others_left_out() -> None:
    module = Module()
    inside = [id(part) for part in module.model.modules()]
    own, rest = ModuleState(module, layers=["model.0"]), ModuleState(module, inside)
    module.steps, module.model[0].calls, module.model[2].calls = 1, 1, 1
    assert id(module.model[0]) in own.reached
    assert id(module.meters["loss"]) in rest.reached
    assert places(rewound(own)) == {"self.model[0].calls"}
    assert places(rewound(rest)) == {"self.steps"}
    assert module.model[2].calls == 1


def test_a_later_state_is_restored_once_it_was_captured() -> None:
    module = Module()
    state = ModuleState(module)
    with state.writes():
        step(module)
    state.capture()
    assert state.changes() == {}
    module.meters["accuracy"].total, module.made[0] = 2.0, 7.0
    assert places(rewound(state)) == {"self.meters['accuracy'].total", "self.made"}
    assert (module.steps, module.meters["accuracy"].total) == (1, 0.0)
    assert torch.equal(module.made, torch.ones(3))


def test_a_list_that_has_grown_tells_what_is_new() -> None:
    module = Module()
    module.other = [1]
    state, items, other = (
        ModuleState(module),
        AttributePath((), "items"),
        AttributePath((), "other"),
    )
    module.items += [5, 6]
    module.other = [1, 2]
    assert state.changes() == {items: ("extended", [5, 6]), other: ("replaced", [1, 2])}
    state.capture()
    module.items[1].append(7)
    assert state.changes() == {items: ("changed", module.items)}
    module.items.append(8)
    assert state.changes()[items][0] == "changed", "an item of it has changed, too"
    state.capture()
    module.items[0] = 7
    module.items.append(8)
    assert state.changes()[items][0] == "changed", "it has changed besides"


@pytest.mark.parametrize("generator", [
    torch.Generator(), random.Random(0), np.random.RandomState(0), np.random.default_rng(0)
])  # fmt: skip
def test_random_generators_are_put_back_and_written(generator: Any) -> None:
    module, other = nn.Module(), nn.Module()
    module.generator, other.generator = generator, copied(generator)
    theirs, place = other.generator, AttributePath((), "generator")
    assert theirs is not generator

    def draw(generator: Any) -> float:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return float(generator.random())

    state = ModuleState(module)
    drawn = draw(generator)
    ((how, value),) = state.changes().values()
    write(other, place, how, copied(value))
    assert other.generator is theirs
    assert state.rewind()
    assert not state.rewind()
    assert draw(generator) == drawn
    assert draw(theirs) == draw(generator) != drawn


class OfClass(nn.Module):
    """Its class holds what each of its objects changes."""

    count, history, best = 0, [1], Best()

    def step(self) -> None:
        self.count += 1
        self.history.append(2)
        self.best.loss = 0.5


def test_what_a_class_holds_is_put_back_and_named() -> None:
    module = OfClass()
    state = ModuleState(module)
    module.step()
    changes = rewound(state)
    assert places(changes) == {"self.count", "self.history", "self.best.loss"}
    assert (OfClass.history, OfClass.best, OfClass.count) == ([1], Best(), 0)
    assert not {"count", "history", "best"} & vars(module).keys()
    assert owner_of(module, AttributePath(((".", "best"),), "loss")) is OfClass.best


def test_hooks_that_a_step_registers_once_stay_with_its_note_of_it() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.is_prepared, module.count, module.kept = False, 0, None
    state = ModuleState(module)

    def step() -> None:
        if not module.is_prepared:
            module[0].register_forward_hook(lambda *_: None)
            module.is_prepared, module.kept = True, []
        module.count += 1

    for _ in range(2):
        step()
        assert state.rewind()
        assert len(module[0]._forward_hooks) == 1
        assert (module.is_prepared, module.count, module.kept) == (True, 0, [])


@given(st.dictionaries(st.sampled_from("abcd"), VALUES), st.data())
@settings(max_examples=150, deadline=None)
def test_any_change_is_found_and_undone(values: dict[str, Any], data: Any) -> None:
    module = nn.Module()
    vars(module).update(values)
    before, state = copy.deepcopy(values), ModuleState(module)
    changed = data.draw(st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=3))
    for name, value in changed.items():
        now = vars(module).get(name)
        if isinstance(now, (list, deque)):
            now.extend([value, value])
        elif isinstance(now, dict):
            now["added"] = value
        elif isinstance(now, Tensor) and now.numel():
            now.fill_(77.0)
        else:
            vars(module)[name] = value
    different = {name for name in vars(module) if name not in vars(nn.Module())}
    different = {n for n in different if not same(before.get(n, MISSING), vars(module)[n])}
    assert {place.name for place in rewound(state)} == different
    now = {name: vars(module)[name] for name in values}
    assert all(now[name] is value for name, value in values.items())
    assert same(now, before)
    assert vars(module).keys() - values.keys() == vars(nn.Module()).keys()


@given(VALUES)
def test_a_copy_is_the_same_and_independent(value: Any) -> None:
    held = copied(value)
    assert same(held, value)
    assert same(value, copy.deepcopy(value))
    if isinstance(value, list):
        value.append(1)
        assert not same(held, value)


@given(VALUES, VALUES)
def test_what_is_not_equal_is_not_the_same(one: Any, other: Any) -> None:
    assert same(one, other) == same(other, one)
    if type(one) is not type(other):
        assert not same(one, other)


def test_what_is_written_to_is_named_even_if_it_is_equal() -> None:
    """Tensors are not compared: operators that write to them are seen, also by ``x.data``."""
    module = nn.Linear(1, 2048)
    module.register_buffer("teacher", module.weight.detach().clone())
    module.register_buffer("large", torch.ones(4096))
    module.register_buffer("other", torch.ones(4096))
    state = ModuleState(module)
    with state.writes():
        module.teacher.mul_(0.5).add_(0.5 * module.weight.detach())
        torch._foreach_mul_([module.bias.data], 1)
        module.large.data.mul_(2)
    assert places(rewound(state)) == {"self.teacher", "self.bias", "self.large"}
    assert torch.equal(module.large, torch.ones(4096))


def test_statistics_of_any_size_are_put_back() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2048))
    state, before = ModuleState(module), copy.deepcopy(module.state_dict())
    with state.writes():
        module(torch.randn(4, 2048))
    assert state.rewind()
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
