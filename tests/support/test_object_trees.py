"""Tensors are found in any object, and others take their places."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_axosparse.support.object_trees import (
    CannotPickle,
    TakenApart,
    object_leaves,
    object_map,
    put_together,
    take_apart,
)


@dataclass(frozen=True)
class Frozen:
    one: Any
    rest: Any = "plain"


class Pair(NamedTuple):
    first: Any
    second: Any


class Own:
    """A class of the user's, which knows itself."""

    def __init__(self, hidden: Any) -> None:
        self.hidden, self.me = hidden, self


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Fixed:
    """A class that lets nobody assign to its attributes, and has no dict."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        object.__setattr__(self, "hidden", hidden)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"cannot assign to {name}")


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    one: Any


class OfTwo(tuple):
    """Takes other arguments than it is copied with."""

    def __new__(cls, first: Any, second: Any) -> Any:
        return super().__new__(cls, (first, second))


def local_fixed(hidden: Any) -> Any:
    class Local(Fixed):
        __slots__ = ("more",)

    made = Local(hidden[1])
    object.__setattr__(made, "more", hidden[0])
    return made


def local(hidden: Any) -> Any:
    """An object of a class that cannot be imported."""

    class Local:
        def __init__(self) -> None:
            self.hidden = hidden

    return Local()


MAKE: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], list[Any]]]] = {
    "tensor": (lambda a, b: a, lambda o: [o]),
    "list": (lambda a, b: [a, [1, b]], lambda o: [o[0], o[1][1]]),
    "tuple": (lambda a, b: (a, (b,)), lambda o: [o[0], o[1][0]]),
    "dict": (lambda a, b: {"x": a, 1: {"y": b}}, lambda o: [o["x"], o[1]["y"]]),
    "named tuple": (lambda a, b: Pair(a, b), list),
    "ordered dict": (lambda a, b: OrderedDict(x=a, y=b), lambda o: [o["x"], o["y"]]),
    "deque": (lambda a, b: deque([a, b], maxlen=2), list),
    "dataclass": (lambda a, b: Frozen(a, [b]), lambda o: [o.one, o.rest[0]]),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b={"c": b}), lambda o: [o.a, o.b["c"]]),
    "user dict": (lambda a, b: UserDict(a=a, b=b), lambda o: [o["a"], o["b"]]),
    "own class": (lambda a, b: Own([a, b]), lambda o: o.me.hidden),
    "slots": (lambda a, b: Slotted((a, b)), lambda o: list(o.hidden)),
    "slots that are fixed": (lambda a, b: Fixed((a, b)), lambda o: list(o.hidden)),
    "frozen slots": (lambda a, b: FrozenSlots((a, b)), lambda o: list(o.one)),
    "local fixed": (lambda a, b: local_fixed((a, b)), lambda o: [o.more, o.hidden]),
    "read-only dict": (lambda a, b: MappingProxyType({"x": a, "y": b}), lambda o: [*o.values()]),
    "views": (lambda a, b: {"x": a, "y": b}.values(), list),
    "local class": (lambda a, b: local([a, b]), lambda o: o.hidden),
    "inside one another": (
        lambda a, b: [Frozen(Pair(Own(a), "x")), {"y": deque([Slotted(b)])}],
        lambda o: [o[0].one.first.hidden, o[1]["y"][0].hidden],
    ),
}


@pytest.mark.parametrize("kind", MAKE)
def test_tensors_are_found_and_replaced_wherever_they_are(kind: str) -> None:
    make, read = MAKE[kind]
    tree = make(torch.ones(1), torch.zeros(2))
    own = read(tree)
    assert [*map(id, object_leaves(tree, Tensor))] == [*map(id, own)]
    rest, taken = take_apart(tree, Tensor)
    assert [*map(id, taken)] == [*map(id, own)]
    for made in (
        object_map(Tensor, lambda tensor: str(len(tensor)), tree),
        put_together(rest, [str(len(tensor)) for tensor in taken]),
    ):
        assert type(made).__name__ == type(tree).__name__ or kind == "tensor"
        assert read(made) == [str(len(tensor)) for tensor in own]
    assert [*map(id, read(tree))] == [*map(id, own)], "the object itself is left alone"


trees = st.recursive(
    st.one_of(st.builds(torch.ones, st.integers(0, 3)), st.none(), st.integers(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
)


@given(trees)
def test_containers_of_torch_have_the_leaves_that_torch_finds(tree: Any) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert [*map(id, object_leaves(tree, Tensor))] == [*map(id, leaves)]
    rest, taken = take_apart(tree, Tensor)
    assert [*map(id, taken)] == [*map(id, leaves)]
    made, again = object_map(Tensor, len, tree), put_together(rest, [*map(len, taken)])
    assert made == again == pytree.tree_map_only(Tensor, len, tree)


def test_what_holds_none_is_not_copied() -> None:
    for tree in (Own(1), SimpleNamespace(a="x"), UserDict(a=1), 3, "text", None):
        assert object_map(Tensor, len, tree) is tree
        assert object_leaves(tree, Tensor) == []


def test_several_kinds_are_taken_out_in_order() -> None:
    lock = threading.Lock()
    tree = Frozen([torch.ones(1), 2.5], {"x": (lock, torch.ones(2), 7.5)})
    kinds = (Tensor, float, type(lock))
    assert [type(leaf) for leaf in object_leaves(tree, kinds)] == [
        *(Tensor, float, type(lock), Tensor, float)
    ]


def test_what_cannot_be_pickled_is_said_or_replaced() -> None:
    kept, broken = torch.ones(1), SimpleNamespace(lock=threading.Lock(), x=torch.ones(2))
    with pytest.raises(CannotPickle, match=r"list: cannot pickle '_thread\.lock' object"):
        take_apart([kept, broken], Tensor)
    assert object_leaves([kept, broken], Tensor) == [kept]
    assert object_map(Tensor, len, [kept, broken]) == [1, broken]
    assert object_map(Tensor, len, [kept, broken], type) == [1, SimpleNamespace]


def test_what_cannot_be_made_again_is_not_copied() -> None:
    tree = ["x", OfTwo(torch.ones(2), 1)]
    assert object_map(Tensor, lambda value: value + 1, tree)[1] is tree[1]


def test_of_what_is_taken_apart_only_the_tensors_are_replaced() -> None:
    apart = TakenApart(*take_apart(OfTwo(torch.ones(2), 1), Tensor))
    assert object_leaves([apart], Tensor) == apart.taken
    assert object_map(Tensor, len, [apart], type) == [TakenApart(apart.rest, [2])]
