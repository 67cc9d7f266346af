from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn import grad as dense_gradients

from lightning_axosparse.sparse.backend import Backend
from lightning_axosparse.sparse.kernels import convolutions
from lightning_axosparse.sparse.ops import convolution
from lightning_axosparse.sparse.ops.convolution import Geometry
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.support import threads as threads_module
from tests.sparse.masking import close

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
none_or_more = st.tuples(st.integers(0, 4), st.integers(0, 4))


def case(geometry, density=0.2, seed=0):
    """A dense weight, its layout and unpruned values, and images."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(geometry.weight, generator=generator) < density
    mask[1::5] = False  # output channels of which all entries are pruned
    dense = torch.randn(geometry.weight, generator=generator).where(mask, torch.zeros(()))
    layout = layout_of(mask, "segments")
    images = torch.randn(geometry.images, generator=generator)
    gradient = torch.randn(geometry.outputs, generator=generator)
    return dense, layout, layout.compress(dense), images, gradient


def square(images, channels, outputs, kernel, size, stride=1, padding=0, groups=1):
    weight = (outputs, channels // groups, kernel, kernel)
    steps = ((number, number) for number in (stride, padding, 1))
    return Geometry(weight, (images, channels, size, size), *steps, groups)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    images=st.integers(0, 3),
    groups=st.sampled_from([1, 2]),
    outputs=st.sampled_from([1, 3, 8]),
    kernel=pairs,
    size=st.tuples(st.integers(1, 20), st.integers(1, 14)),
    stride=pairs,
    padding=none_or_more,
    dilation=pairs,
    density=st.sampled_from([0.0, 0.2, 1.0]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_convolutions_are_those_of_the_dense_weight(
    images, groups, outputs, kernel, size, stride, padding, dilation, density, biased, seed
):
    weight = (outputs * groups, 70, *kernel)
    options = stride, padding, dilation, groups
    geometry = Geometry(weight, (images, 70 * groups, *size), *options)
    assume(images == 0 or min(geometry.outputs) > 0)
    assume(geometry.fits)
    dense, layout, values, inputs, gradient = case(geometry, density, seed)
    bias = torch.randn(weight[0]) if biased else None
    found = convolution.forward(inputs, values, layout, geometry, bias)
    close(
        found,
        lambda x, w, *b: F.conv2d(x, w, *(b or [None]), *options),
        inputs,
        dense,
        *([bias] if biased else []),
    )
    found = convolution.transposed(gradient, values, layout, geometry)
    close(
        found,
        lambda w, g: dense_gradients.conv2d_input(inputs.shape, w, g, *options),
        dense,
        gradient,
    )
    found = convolution.sddmm(gradient, inputs, layout, geometry)
    close(
        found,
        lambda x, g: layout.compress(dense_gradients.conv2d_weight(x, weight, g, *options)),
        inputs,
        gradient,
    )


def results(geometry):
    _, layout, values, images, gradient = case(geometry)
    return (
        convolution.forward(images, values, layout, geometry),
        convolution.transposed(gradient, values, layout, geometry),
        convolution.sddmm(gradient, images, layout, geometry),
    )


GEOMETRIES = [
    square(3, 64, 20, 3, 9, padding=1),
    square(2, 80, 30, 1, 12),
    square(3, 64, 8, 3, 9, 2),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_bits_are_the_same_with_any_number_of_threads(geometry, threads, monkeypatch):
    monkeypatch.setattr(threads_module, "WORK_OF_A_THREAD", 1)
    found = []
    for number in (1, 2, 3, 5):
        threads(number)
        found.append(results(geometry))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_an_images_bits_do_not_depend_on_the_images_beside_it(geometry):
    _, layout, values, images, gradient = case(geometry)
    alone = Geometry(
        geometry.weight,
        (1, *geometry.images[1:]),
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.groups,
    )
    outputs = convolution.forward(images, values, layout, geometry)
    one = convolution.forward(images[1:2], values, layout, alone)
    assert torch.equal(one, outputs[1:2])
    inputs = convolution.transposed(gradient, values, layout, geometry)
    one = convolution.transposed(gradient[1:2], values, layout, alone)
    assert torch.equal(one, inputs[1:2])


def test_many_images_are_convolved_some_at_a_time(monkeypatch):
    sizes = 7, 64, 20, 3, 9, 1, 1
    whole = results(square(*sizes))
    monkeypatch.setattr(convolution, "_CHUNK", 2 * 64 * 10 * 10)
    parts = square(*sizes)
    assert [chunk.stop for chunk in parts.planes.chunks] == [2, 4, 6, 8]
    found = results(parts)
    assert torch.equal(found[0], whole[0])
    assert torch.equal(found[1], whole[1])
    torch.testing.assert_close(found[2], whole[2])


def test_loading_the_loops_compiles_what_convolutions_of_any_size_run():
    convolution.load_loops.cache_clear()
    convolution.load_loops()
    for geometry in GEOMETRIES:
        results(geometry)
    loops = (
        convolutions.places,
        convolutions.transposed_places,
        convolutions.convolve,
        convolutions.correlate,
    )
    assert [len(loop.signatures) for loop in loops] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "geometry",
    [
        square(1, 64, 8, 1, 9, padding=1),  # more zeros than the filter reaches
        square(1, 64, 8, 3, 2),  # no output
        Geometry((8, 64, 1, 1), (1, 63, 9, 9), (1, 1), (0, 0), (1, 1), 1),
    ],
)
def test_what_does_not_fit(geometry):
    assert not geometry.fits


def test_what_is_chosen():
    operand = torch.zeros(1)
    few, many = (layout_of(torch.rand(30, 64, 3, 3) < density) for density in (0.2, 0.3))
    choices = [
        (compute, layout is few)
        for compute in ("auto", "dense", "sparse")
        for layout in (few, many)
        if convolution.should_run(layout, Backend(compute, "matrix"), operand)
    ]
    assert choices == [("auto", True), ("sparse", True), ("sparse", False)]
    assert not convolution.should_run(few, Backend("auto", "dense"), operand)
    assert not convolution.should_run(few, Backend("sparse"), operand.bfloat16())
    depthwise = layout_of(torch.rand(30, 1, 3, 3) < 0.2)
    assert not convolution.should_run(depthwise, Backend("sparse"), operand)
    assert not convolution.large_enough(Backend("auto"), square(1, 64, 8, 3, 7))
    assert convolution.large_enough(Backend("sparse"), square(1, 64, 8, 3, 7))
