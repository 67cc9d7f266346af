"""What is sent arrives as it was, with its gradients, by loopback and in bytes."""

from __future__ import annotations

import pickle
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_axosparse.pipeline.crossing.message import Message, decode, detached_message, encode
from lightning_axosparse.support.object_trees import CannotPickle

CPU = torch.device("cpu")

dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
shapes = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def leaves(draw: Any) -> Any:
    shape, dtype = draw(shapes), draw(dtypes)
    tensor = torch.randint(0, 2, shape).to(dtype)
    if draw(st.booleans()) and len(shape) == 2:
        tensor = tensor.t()
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


trees = st.recursive(
    st.one_of(leaves(), st.none(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


def arrived(tree: Any) -> list[tuple[list[Tensor], Message]]:
    """What arrives of an object as bytes, and by loopback, with what was sent."""
    header, block, sent = encode(tree, CPU)
    assert block.dtype is torch.uint8
    own, looped = detached_message(tree)
    return [(list(sent), decode(header, block.clone())), (list(own), looped)]


@given(tree=trees)
def test_a_tree_arrives_as_it_was_sent(tree: Any) -> None:
    for sent, message in arrived(tree):
        copy = message.content
        assert pytree.tree_structure(copy) == pytree.tree_structure(tree)
        for got, own in zip(pytree.tree_leaves(copy), pytree.tree_leaves(tree), strict=True):
            if isinstance(own, Tensor):
                assert torch.equal(got, own)
                assert got.dtype is own.dtype
                assert got.requires_grad == own.requires_grad
                assert got.is_leaf
            else:
                assert got == own
        assert [id(each) for each in sent] == [
            id(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)
        ]


@dataclass
class Pair:
    one: Tensor
    rest: list[Any]


class Named(dict):
    """A subclass of dict with an attribute."""

    tag: Tensor


class Own:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.name = hidden, "own"


def named(tensor: Tensor) -> Named:
    made = Named(a=tensor)
    made.tag = tensor * 2
    return made


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda t: Pair(t, [t * 2, "x"]), lambda o: (o.one, o.rest[0])),
        (lambda t: UserDict(a=t, b=t * 2), lambda o: (o["a"], o["b"])),
        (lambda t: SimpleNamespace(a=t, b={"c": t * 2}), lambda o: (o.a, o.b["c"])),
        (lambda t: {t}, lambda o: (*o, *o)),
        (named, lambda o: (o["a"], o.tag)),
        (lambda t: Own(t), lambda o: (o.hidden, o.hidden)),
        (lambda t: [Own(t), (Pair(t, [t * 2]),)], lambda o: (o[0].hidden, o[1][0].rest[0])),
    ],
)
def test_objects_arrive_with_leaves_of_a_new_graph(make: Any, read: Any) -> None:
    tensor = torch.arange(3.0, requires_grad=True)
    given = make(tensor)
    for sent, message in arrived(given):
        content = message.content
        assert type(content) is type(given)
        for own, other in zip(read(content), read(given), strict=True):
            assert torch.equal(own, other)
            assert own.is_leaf
            assert own.requires_grad
            assert any(own is each for each in message.tensors)
        # The gradients of what has arrived lead back through what was sent.
        tensor.grad = None
        sum((each * 3).sum() for each in read(content)).backward()
        for own, of_arrived in zip(sent, message.tensors, strict=True):
            if of_arrived.grad is not None:
                own.backward(of_arrived.grad, retain_graph=True)
        assert tensor.grad is not None
        expected = torch.autograd.grad(sum((e * 3).sum() for e in read(make(tensor))), tensor)[0]
        assert torch.equal(tensor.grad, expected)


def test_a_tensor_that_an_object_holds_twice_is_sent_once() -> None:
    tensor = torch.ones(4)
    for sent, message in arrived({"a": tensor, "b": Own(tensor)}):
        assert len({id(each) for each in sent}) == 1
        assert torch.equal(message.content["b"].hidden, message.content["a"])


def test_what_cannot_be_pickled_is_refused_by_its_type() -> None:
    with pytest.raises(CannotPickle, match="generator"):
        encode({"a": torch.ones(1), "b": (n for n in range(2))}, CPU)


def test_one_contiguous_tensor_is_sent_without_a_copy() -> None:
    tensor = torch.arange(6.0)
    header, block, sent = encode((tensor, None), CPU)
    assert block.data_ptr() == tensor.data_ptr()
    assert sent[0] is tensor
    assert len(pickle.loads(header)[1]) == 1
