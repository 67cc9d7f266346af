"""What layers give for micro-batches joins to what they give for the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.pipeline.crossing.message import Activation, Place, SideOutput, SidePlace
from lightning_axosparse.pipeline.crossing.placeholder import TensorDescription
from lightning_axosparse.pipeline.joining import (
    Axis,
    SampleLayout,
    SampleLayouts,
    axes,
    difference,
    differs,
    fitting_layouts,
    join,
    joined_by,
    learn,
    sent_tensors,
)
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain

SIZES = (3, 3, 1)
SAMPLES = sum(SIZES)


@st.composite
def tensors(draw: Any) -> tuple[Axis, Tensor, list[int]]:
    """A tensor, how its samples lie, and the sizes of micro-batches."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    views, of_view = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    axis = Axis(draw(st.integers(0, len(shape))), views * of_view, views)
    shape.insert(axis.dim, axis.rows * sum(sizes))
    return axis, torch.arange(float(torch.Size(shape).numel())).view(shape), sizes


def split(axis: Axis, whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The rows of consecutive micro-batches."""
    begins = accumulate(sizes, initial=0)
    return [axis.part(whole, first, size) for first, size in zip(begins, sizes, strict=False)]


@given(tensors())
def test_parts_join_to_the_whole(drawn: tuple[Axis, Tensor, list[int]]) -> None:
    axis, whole, sizes = drawn
    parts = split(axis, whole, sizes)
    assert [part.shape[axis.dim] for part in parts] == [axis.rows * size for size in sizes]
    assert torch.equal(axis.cat(parts), whole)
    total, first = torch.zeros_like(whole), 0
    for part, size in zip(parts, sizes, strict=True):
        axis.add_part(total, part, first, size)
        first += size
    assert torch.equal(total, whole)


@given(tensors())
def test_how_samples_lie_follows_from_shapes_and_values(
    drawn: tuple[Axis, Tensor, list[int]],
) -> None:
    axis, whole, sizes = drawn
    if len(sizes) == 1:
        return
    parts = split(axis, whole, sizes)
    assert axis in axes(whole.shape, parts[0].shape, sum(sizes), sizes[0])
    found, apart = fitting_layouts(whole, parts, sizes, 1e-6)
    assert apart == 0
    assert axis in found
    for each in found:
        assert isinstance(each, Axis)
        assert torch.equal(joined_by(each, parts, sizes), whole)


def test_views_of_a_sample_may_follow_one_another() -> None:
    one, other = torch.rand(SAMPLES, 2), torch.rand(SAMPLES, 2)
    parts = [torch.cat(each) for each in zip(one.split(SIZES), other.split(SIZES), strict=True)]
    assert fitting_layouts(torch.cat([one, other]), parts, SIZES, 1e-6) == ([Axis(0, 2, 2)], 0)


def gradients_through(
    layout: SampleLayout, parts: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[Tensor, list[Any]]:
    """A gradient of the joined tensor, and those of the parts."""
    layouts = SampleLayouts({("output", 0): [layout]})
    joined = join([Activation(part.requires_grad_()) for part in parts], sizes, layouts)
    (tensor,) = joined.tensors
    tensor.grad = torch.rand(tensor.shape)
    return tensor.grad, [own for (own,) in joined.gradients(len(sizes))]


@pytest.mark.parametrize(
    ("layout", "shares"),
    [("alike", (1, 0, 0)), ("mean", (3 / 7, 3 / 7, 1 / 7)), ("sum", (1, 1, 1))],
)
def test_parts_without_samples_share_the_gradient(
    layout: SampleLayout, shares: Sequence[float]
) -> None:
    gradient, own = gradients_through(layout, [torch.ones(2)] * len(SIZES), SIZES)
    for of_part, share in zip(own, shares, strict=True):
        if share:
            torch.testing.assert_close(of_part, gradient * share)
        else:
            assert of_part is None


@given(tensors())
def test_parts_with_samples_have_their_rows_of_the_gradient(
    drawn: tuple[Axis, Tensor, list[int]],
) -> None:
    axis, whole, sizes = drawn
    gradient, own = gradients_through(axis, split(axis, whole, sizes), sizes)
    for of_part, expected in zip(own, split(axis, gradient, sizes), strict=True):
        assert torch.equal(of_part, expected)


HOOK = SidePlace(1, "act", "_forward_hooks", 0)


def activation(x: Tensor, loss: Tensor, unsent: TensorDescription | None = None) -> Activation:
    """What a stage gives for samples, with something in all places."""
    return Activation(
        output=[SimpleNamespace(x=x, name="own"), x.sum(1)],
        values=((Place(0, 1, 0), x.t() * 2),),
        forms=((0, unsent or TensorDescription.of(x)),),
        side_outputs=(SideOutput(HOOK, {"loss": loss, "mask": torch.ones(4, 4)}),),
    )


def activations() -> tuple[Activation, list[Activation]]:
    x = torch.rand(SAMPLES, 4, requires_grad=True)
    parts = x.split(SIZES)
    return activation(x, x.mean()), [activation(part, part.mean()) for part in parts]


def test_activations_join_as_was_learned() -> None:
    whole, parts = activations()
    known, differences = learn(whole, parts, SIZES, 1e-4)
    assert max(by for _, by in differences) < 1e-6
    axes_of = [[Axis(0)], [Axis(0)], [Axis(1)], [Axis(0)]]
    assert list(known.values()) == [*axes_of, ["mean"], ["alike", "mean"]]
    joined = join(parts, SIZES, SampleLayouts(dict(known)))
    assert joined.activation.output[0].name == "own"
    assert joined.activation.forms == whole.forms
    sent = sent_tensors(whole)
    assert [id(each) for each in sent_tensors(joined.activation)] == [*map(id, joined.tensors)]
    for ours, theirs in zip(joined.tensors, sent, strict=True):
        assert ours.is_leaf
        assert ours.requires_grad == theirs.requires_grad
        torch.testing.assert_close(ours.detach(), theirs.detach())
    sum((each**2).sum() for each in joined.tensors if each.requires_grad).backward()
    gradients = joined.gradients(len(SIZES))
    expected = [2 * each.detach() for each in sent]
    for number, size in enumerate(SIZES):
        own, first = gradients[number], sum(SIZES[:number])
        torch.testing.assert_close(own[0], expected[0][first : first + size])
        torch.testing.assert_close(own[2], expected[2][:, first : first + size])
        torch.testing.assert_close(own[3], expected[3] * size / SAMPLES)
        assert own[4] is None


def test_activations_join_by_their_shapes_where_nothing_was_learned() -> None:
    x, table = torch.rand(SAMPLES, 3), torch.rand(5)
    parts = [Activation((part, part.t(), table)) for part in x.split(SIZES)]
    joined = join(parts, SIZES, SampleLayouts())
    torch.testing.assert_close(joined.tensors, [x, x.t(), table])


def test_a_layout_that_does_not_fit_any_longer_is_found_anew() -> None:
    layouts = SampleLayouts({"key": [Axis(1, 2)]}, one_view=True)
    parts = [torch.rand(4, 2 * size) for size in SIZES]
    assert layouts.of("key", parts, SIZES) == [Axis(1, 2)]
    assert layouts.of("key", [part.t() for part in parts], SIZES) == [Axis(0, 2)]
    assert layouts.of("other", [torch.rand(n + 1) for n in SIZES], SIZES) == []
    compared = replace(layouts, one_view=False)
    assert compared.of("other", parts, SIZES) == [Axis(1, 2), Axis(1, 2, 2)]


def two_views(first: Tensor, second: Tensor, sizes: Sequence[int]) -> list[Activation]:
    pairs = zip(first.split(sizes), second.split(sizes), strict=True)
    return [Activation(torch.cat(pair)) for pair in pairs]


def test_a_later_batch_decides_between_layouts() -> None:
    full, padded = torch.ones(SAMPLES, 2), torch.rand(SAMPLES, 2)
    layouts = SampleLayouts()

    def learned(first: Tensor, second: Tensor) -> Sequence[SampleLayout]:
        whole = Activation(torch.cat([first, second]))
        known, _ = learn(whole, two_views(first, second, SIZES), SIZES, 1e-6)
        layouts.narrow(("output", 0), known["output", 0])
        return layouts.known["output", 0]

    assert learned(full, full) == [Axis(0, 2), Axis(0, 2, 2)]
    # It makes no difference for these values, but it does for others, and for gradients.
    assert torch.equal(
        join(two_views(full, full, SIZES), SIZES, layouts).tensors[0], full[:1].expand(14, 2)
    )
    for first in (padded, full.clone().requires_grad_()):
        with pytest.raises(RunAgain) as raised:
            join(two_views(first, full, SIZES), SIZES, layouts)
        assert raised.value.why is Rerun.SAMPLES
        # One micro-batch has the rows of the batch.
        join(two_views(first, full, [SAMPLES]), [SAMPLES], layouts)
    assert learned(padded, full) == [Axis(0, 2, 2)]
    assert learned(full, full) == [Axis(0, 2, 2)]
    (joined,) = join(two_views(padded, full, SIZES), SIZES, layouts).tensors
    assert torch.equal(joined, torch.cat([padded, full]))


def ragged(size: int) -> Tensor:
    return torch.rand(size, size + 1)


LEFT = SideOutput(HOOK, torch.ones(2))


@pytest.mark.parametrize(
    "of_part",
    [
        lambda n: Activation(output=ragged(n)),
        lambda n: Activation(values=((Place(2, 1, 0), ragged(n)),)),
        lambda n: Activation(side_outputs=(SideOutput(HOOK, ragged(n)),)),
        lambda n: Activation(forms=((3, TensorDescription.of(ragged(n))),)),
        lambda n: Activation(output=torch.ones(n), side_outputs=(LEFT,) * (n > 1)),
        lambda n: Activation(output=torch.full((2,), float(n))),
        lambda n: Activation(output=torch.rand(())),
    ],
    ids=["shapes", "between", "inside", "form", "not in all", "other values", "numbers"],
)
def test_values_that_cannot_be_joined_are_those_of_an_undivided_batch(of_part: Any) -> None:
    with pytest.raises(RunAgain) as raised:
        join([of_part(size) for size in SIZES], SIZES, SampleLayouts())
    assert raised.value.why is Rerun.SAMPLES
    join([of_part(SAMPLES)], [SAMPLES], SampleLayouts())


def test_a_tensor_without_samples_is_compared_in_every_batch() -> None:
    layouts = SampleLayouts({("output", 0): ["alike"]})
    assert torch.equal(
        join([Activation(torch.ones(3))] * 3, SIZES, layouts).tensors[0], torch.ones(3)
    )
    for other in (torch.zeros(3), torch.ones(2)):
        with pytest.raises(RunAgain):
            join([*[Activation(torch.ones(3))] * 2, Activation(other)], SIZES, layouts)


def test_layers_that_give_something_else_in_micro_batches_are_found() -> None:
    whole, parts = activations()
    infinite = float("inf")

    def differing(other: Activation) -> dict[Any, float]:
        found = learn(whole, [other, *parts[1:]], SIZES, 1e-6)[1]
        return {key: by for key, by in found if by > 1e-6}

    assert differing(parts[0]) == {}
    first = parts[0]
    x = first.output[0].x
    shifted = first._replace(output=[SimpleNamespace(x=x + 1, name="own"), first.output[1]])
    largest = float(whole.output[0].x.max())
    assert differing(shifted) == pytest.approx({("output", 0): 1 / largest})
    fewer = first._replace(values=(), side_outputs=())
    assert differing(fewer)[Place(0, 1, 0)] == infinite
    wider = first._replace(forms=((0, TensorDescription.of(torch.ones(3, 5))),))
    assert differing(wider) == {("form", 0, 0): infinite}


def test_numbers_in_what_layers_give_must_not_depend_on_the_samples() -> None:
    def found(*sizes: int) -> list[tuple[Any, float]]:
        whole, *parts = (Activation(output=(torch.ones(7)[:n], {"count": n})) for n in sizes)
        return learn(whole, parts, SIZES, 1e-4)[1]

    assert (("output", -1), float("inf")) in found(SAMPLES, *SIZES)


def test_values_that_are_not_finite_are_compared_by_their_places() -> None:
    one = torch.tensor([1.0, -torch.inf, torch.nan, 2.0])
    assert difference(one, one) == 0
    assert difference(one + 2e-6, one) == pytest.approx(1e-6, rel=0.1)
    for other in ([1.0, torch.inf, torch.nan, 2.0], [1.0, -torch.inf, 0.0, 2.0]):
        assert difference(torch.tensor(other), one) == 1
    assert difference(torch.tensor([torch.nan, -torch.inf, torch.nan, 2.0]), one) == 1


def test_masked_entries_do_not_hide_differences() -> None:
    one = torch.tensor([1.0, 2.0, -1e9])
    assert difference(one, one) == 0
    assert difference(torch.tensor([1.0, 2.2, -1e9]), one) == pytest.approx(0.1)
    assert difference(torch.tensor([1.0, 2.2, -1e9 + 64]), one) == pytest.approx(0.1)
    assert difference(torch.tensor([1.0, 2.0, -1e9 + 64]), one) < 1e-6
    assert difference(torch.tensor([1.0, 2.0, -1e9 - 1e8]), one) == pytest.approx(0.1)
    masked = torch.tensor([-1e9, -1e9])
    assert difference(masked, masked) == 0


def test_tensors_differ_by_more_than_rounding() -> None:
    one = torch.tensor([1.0, -torch.inf, torch.nan, -1e9])
    assert not differs(one, one)
    assert not differs(one * (1 + 1e-7), one)
    for place, other in enumerate([1.01, torch.inf, 0.0, -2e9]):
        assert differs(one.index_fill(0, torch.tensor(place), other), one)
    assert not differs(one[:0], one[:0])
    assert differs(torch.tensor([2]), torch.tensor([3]))
    assert not differs(one[:0].cfloat(), one[:0].cfloat())


def test_large_values_that_are_no_mask_are_compared() -> None:
    one = torch.tensor([2e4, 3e4, 1.0])
    assert difference(torch.tensor([2.01e4, 3.02e4, 1.0]), one) == pytest.approx(200 / 3e4)
    assert difference(torch.tensor([2e4, 3e4, 1.1]), one) == pytest.approx(0.1 / 3e4, rel=0.01)
