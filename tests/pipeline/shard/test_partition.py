from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.generators import Generators
from lightning_axosparse.pipeline.shard.partition import (
    Partition,
    UnknownOrderError,
    balance,
    count_parameters,
    find_layers,
    partition_layers,
    parts_of_sizes,
)


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


class Ordered(nn.Module):
    """Its containers are made in another order than that in which they are called."""

    def __init__(self, order: str, example: Any = None) -> None:
        super().__init__()
        self.head, self.unused = nn.Sequential(*linears(2)), nn.ModuleList(linears(2))
        self.body, self.norm = nn.ModuleList(linears(3)), nn.BatchNorm1d(4)
        self.scale = torch.full((4,), 0.5)  # neither a parameter nor a buffer
        self.order, self.example_input_array = order, example
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        getattr(self, self.order)(nn.functional.dropout(self.norm(x) * self.scale))
        return x

    def plain(self, x: Tensor) -> None:
        for layer in self.body:
            x = x + layer(x)
        self.head(x)

    def twice(self, x: Tensor) -> None:
        self.plain(x)
        self.head(x)

    def in_turns(self, x: Tensor) -> None:
        for layer in self.body:
            x = self.head[0](layer(x))

    def partly(self, x: Tensor) -> None:
        self.head(self.body[0](x))

    def alternating(self, x: Tensor) -> float:
        x = x + random.random() + float(np.random.rand())
        for layer, other in zip(self.head, self.body[1:], strict=True):
            x = other(layer(x))
        self.body[0](x)
        return float(x.sum())  # needs values

    def failing(self, x: Tensor) -> None:
        self.plain(x)
        raise ValueError("some may be called later")

    def by_values(self, x: Tensor) -> None:
        if x.sum() > -1:
            self.plain(x)


def test_containers_are_found_in_the_order_of_their_calls() -> None:
    x = torch.randn(8, 4)
    for example in (x, (x,), {"x": x}):
        model = Ordered("plain", example)
        state, seed = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
        assert list(find_layers(model, None, 5)) == [
            *("body.0", "body.1", "body.2"),
            *("head.0", "head.1"),
        ]
        assert torch.equal(seed, torch.get_rng_state())
        assert model.calls == 0
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert not any(layer._forward_pre_hooks for layer in model.modules())
    model = Ordered("alternating", x)
    states = Generators(torch.device("cpu"))
    alternating = ["head.0", "body.1", "head.1", "body.2", "body.0"]
    assert list(find_layers(model, None, 5)) == alternating
    assert Generators(torch.device("cpu")) == states, "after an error, too"
    model.body[1].compile()
    assert len(find_layers(model, None, 5)) == 5


def test_too_few_layers_are_those_that_the_step_calls() -> None:
    class OfBody(Ordered):
        def body_alone(self, x: Tensor) -> None:
            for layer in self.body:
                x = layer(x)

    words = r"g_inter=4 .*but 'body', which the step calls, has 3"
    with pytest.raises(MisconfigurationException, match=words):
        find_layers(OfBody("body_alone", torch.randn(8, 4)), None, 4)


def test_lists_of_lists_are_in_the_order_of_calls() -> None:
    class Lists(nn.Module):
        """Calls parts of each list from the last to the first, and one of no tensors twice."""

        def __init__(self, values: bool) -> None:
            super().__init__()
            lists = (nn.ModuleList([*linears(2), nn.ReLU(), nn.Tanh()]) for _ in range(2))
            self.body, self.values = nn.ModuleList(lists), values
            self.example_input_array = torch.full((2, 4), -1.0)

        def forward(self, x: Tensor) -> None:
            for first, second, activation, _ in self.body:
                if not self.values or x.sum() > 0:
                    x = activation(first(activation(second(x))))

    for pipeline in (None, "body"):
        found = find_layers(Lists(values=False), pipeline, 4)
        assert list(found) == ["body.0.1", "body.0.0", "body.1.1", "body.1.0"]
        found = find_layers(Lists(values=True), pipeline, 4)
        assert list(found) == [f"body.{i}.{k}" for i in range(2) for k in range(4)]


def test_a_call_that_needs_values_between_containers_gets_them() -> None:
    body_first = [*(f"body.{n}" for n in range(3)), "head.0", "head.1"]
    assert list(find_layers(Ordered("by_values", torch.ones(8, 4)), None, 5)) == body_first

    class Masked(nn.Module):
        """torch looks at the values of the target's mask."""

        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            self.example_input_array = torch.ones(2, 5, 8), torch.ones(2, 5, 8), mask

        def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
            return self.transformer(source, target, tgt_mask=mask)

    encoder = [f"transformer.encoder.layers.{n}" for n in range(2)]
    decoder = [f"transformer.decoder.layers.{n}" for n in range(3)]
    model, seed = Masked(), torch.get_rng_state()
    assert list(find_layers(model, None, 5)) == encoder + decoder
    assert torch.equal(seed, torch.get_rng_state())


@pytest.mark.parametrize("order", ["twice", "in_turns"])
def test_a_container_that_is_no_sequence_is_left_out_beside_a_larger_one(
    order: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        found = find_layers(Ordered(order, torch.randn(8, 4)), None, 2)
    assert list(found) == ["body.0", "body.1", "body.2"]
    assert "they are no part of the stages" in caplog.text


@pytest.mark.parametrize("order", ["partly", "failing"])
def test_an_order_that_is_not_plain_is_left_to_the_user(order: str) -> None:
    for example in (torch.randn(8, 4), None, "no tensor"):
        with pytest.raises(MisconfigurationException, match="example_input_array"):
            find_layers(Ordered(order, example), None, 2)


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_balance_finds_the_smallest_bottleneck(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    parts = balance(costs, stages)
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert all(len(part) for part in parts)
    cuts = combinations(range(1, len(costs)), stages - 1)
    best = min(max(sum(costs[a:b]) for a, b in pairwise([0, *cut, len(costs)])) for cut in cuts)
    assert max(sum(costs[i] for i in part) for part in parts) == best


def test_equal_layers_are_distributed_evenly() -> None:
    assert [len(part) for part in balance([7.0] * 8, 4)] == [2, 2, 2, 2]
    assert sorted(len(part) for part in balance([1] * 10, 4)) == [2, 2, 3, 3]


def test_a_shared_parameter_counts_once() -> None:
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(3, 5)
    second.weight = first.weight
    assert count_parameters([first, second]) == [15, 5]


def test_the_only_container_is_found() -> None:
    inner = nn.Sequential(*(nn.Sequential(*linears(2)) for _ in range(3)))
    heads = nn.ModuleList([nn.Identity(), nn.Identity()])
    model = Model(embed=nn.Embedding(3, 4), body=Model(h=inner), metrics=heads)
    found = find_layers(model, None, 3)
    assert found == {f"body.h.{i}": layer for i, layer in enumerate(inner)}


def test_lists_in_a_list_hold_layers_and_nothing_is_none() -> None:
    inner = [nn.ModuleList([nn.Linear(4, 4), None, nn.ReLU()]), nn.ModuleDict({"a": linears(1)[0]})]
    body = nn.ModuleList([*inner, None, nn.Sequential(*linears(2))])
    one = nn.ModuleList([nn.ModuleList(linears(2))])
    for pipeline in (None, "body"):
        model = Model(body=body, heads=nn.ModuleList([None, *linears(1)]))
        found = find_layers(model, pipeline, 4)
        assert list(found) == ["body.0.0", "body.0.2", "body.1.a", "body.3"]
    assert list(find_layers(Model(one=one), None, 2)) == ["one.0.0", "one.0.1"]


def test_the_layers_of_a_dict_that_is_named() -> None:
    first, second = linears(2)
    model = Model(layers=nn.ModuleDict({"up": first, "down": second}), head=nn.Linear(4, 4))
    found = find_layers(model, ["layers", "head"], 3)
    assert list(found) == ["layers.up", "layers.down", "head"]
    with pytest.raises(MisconfigurationException, match="there is nothing to partition") as error:
        find_layers(model, None, 2, lambda module, names: list(names))
    assert "pipeline=['layers.up', 'layers.down', 'head']" in str(error.value)


def test_containers_and_modules_in_order() -> None:
    body, head = nn.Sequential(*linears(3)), nn.ModuleList(linears(2))
    model = Model(head=head, stem=nn.Linear(4, 4), body=body)
    found = find_layers(model, ["stem", "body", "head"], 6)
    assert list(found) == ["stem", "body.0", "body.1", "body.2", "head.0", "head.1"]
    assert list(found.values()) == [model.stem, *body, *head]


@pytest.mark.parametrize(
    ("model", "pipeline", "stages", "words"),
    [
        (Model(a=nn.Linear(2, 2)), None, 2, ["nothing to partition", "g_inter=1"]),
        (
            Model(a=nn.Sequential(*linears(2)), b=nn.ModuleList(linears(4))),
            None,
            2,
            ["'a' (2 layers)", "'b' (4 layers)", "pipeline='b'", "pipeline=['a', 'b']"],
        ),
        (Model(a=nn.Sequential(*linears(2))), ["a", "b"], 2, ["pipeline='b'", "nothing"]),
        (Model(a=nn.Sequential(*linears(2))), ["a", "a.0"], 2, ["a module and a part of it"]),
        (Model(a=nn.Sequential(*linears(2))), ["a", "a"], 2, ["one layer object several times"]),
        (Model(a=nn.Linear(2, 2)), ["a"], 2, ["g_inter=2", "'a' has 1"]),
        (Model(a=nn.Sequential(*linears(2))), "b", 2, ["pipeline='b'", "nothing", "'a'"]),
        (Model(a=nn.Linear(2, 2)), "a", 2, ["Linear"]),
        (Model(a=nn.Sequential(*linears(2))), None, 3, ["g_inter=3", "has 2", "g_inter <= 2"]),
        (Model(a=nn.ModuleList(linears(1) * 2)), "a", 2, ["one layer object several times"]),
    ],
)
def test_what_cannot_be_partitioned_is_refused(
    model: nn.Module, pipeline: str | list[str] | None, stages: int, words: list[str]
) -> None:
    with pytest.raises(MisconfigurationException) as error:
        find_layers(model, pipeline, stages)
    assert all(word in str(error.value) for word in words), error.value


class WithoutContainer(nn.Module):
    """LeNet as it is often written: its modules are attributes, and not in the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Model(head=nn.Linear(4, 2), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
        self.example_input_array = torch.zeros(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net.head(torch.relu(self.net.second(torch.relu(self.net.first(x)))))


def test_the_refusal_of_a_module_without_a_container_names_what_works() -> None:
    order = ["net.first", "net.second", "net.head"]
    with pytest.raises(MisconfigurationException) as error:
        find_layers(WithoutContainer(), None, 2)
    assert f"pipeline={order}" in str(error.value)
    assert list(find_layers(WithoutContainer(), order, 2)) == order
    unknown = WithoutContainer()
    del unknown.example_input_array
    with pytest.raises(UnknownOrderError, match="Put the layers of the network into one"):
        find_layers(unknown, None, 2)


def test_given_sizes() -> None:
    assert parts_of_sizes([1, 3], 4, 2) == [range(1), range(1, 4)]
    for sizes in ([1, 2], [4], [0, 4], [2, 1, 1]):
        with pytest.raises(MisconfigurationException, match=r"balance=\["):
            parts_of_sizes(sizes, 4, 2)


def test_parts_that_the_user_gave_are_joined_and_others_partitioned_anew() -> None:
    parts = [range(3), range(3, 4), range(4, 5), range(5, 6)]
    partition = Partition(list("abcdef"), [], parts, [1] * 6)
    assert partition.with_stages(2).parts == [range(3), range(3, 6)]
    assert partition._replace(given=True).with_stages(2).parts == [range(4), range(4, 6)]


@pytest.mark.parametrize(
    ("sizes", "parts", "worst"), [(None, "2 + 3", "1.20"), ([1, 4], "1 + 4", "1.60")]
)
def test_a_partition_says_how_unequal_its_stages_are(
    sizes: list[int] | None, parts: str, worst: str
) -> None:
    module = nn.Module()
    module.layers = nn.Sequential(*linears(5))
    assert str(partition_layers(module, None, sizes, 2)) == (
        f"layers 'layers.0' to 'layers.4' in {parts}, "
        f"the largest stage with {worst} times the mean stage's parameters"
    )


def test_layers_without_sizes_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="A LazyLinear of the layers has no shape"):
        count_parameters([nn.Linear(2, 2), nn.Sequential(nn.LazyLinear(3))])
