from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from lightning_axosparse.pipeline.crossing.message import decode, encode, relink, tensors

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


@given(tree=trees)
def test_a_tree_arrives_as_it_was_sent(tree: Any) -> None:
    header, payload = encode(tree, CPU)
    assert payload.dtype is torch.uint8
    arrived = decode(header, payload.clone())
    for copy in (arrived, relink(tree)):
        assert pytree.tree_structure(copy) == pytree.tree_structure(tree)
        for got, sent in zip(pytree.tree_leaves(copy), pytree.tree_leaves(tree), strict=True):
            if isinstance(sent, torch.Tensor):
                assert torch.equal(got, sent)
                assert got.dtype is sent.dtype
                assert got.requires_grad == sent.requires_grad
                assert got.is_leaf
            else:
                assert got == sent


def test_one_contiguous_tensor_is_sent_without_a_copy() -> None:
    tensor = torch.arange(6.0)
    _, payload = encode((tensor, None), CPU)
    assert payload.data_ptr() == tensor.data_ptr()


def test_tensors_keeps_the_places_of_other_leaves() -> None:
    one = torch.ones(1)
    assert tensors([one, None, {"a": 3, "b": one}]) == [one, None, None, one]
