"""What ``test_kernels.py`` runs in Triton's interpreter: the fused kernels and the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.kernels import fused, reference
from lightning_axosparse.sparse.module import convert
from lightning_axosparse.sparse.store import copies
from lightning_axosparse.sparse.store import layout as layout_module
from lightning_axosparse.sparse.store.formats import BitmapLayout, layout_of


@settings(max_examples=6, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 30), st.sampled_from([1, 7, 130, 257])) | st.just((3, 5000)),
    # Where a GPU rounds to bfloat16 the interpreter truncates; benchmarks.gpu.kernels compares it.
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.float16])] * 2)
    | st.just((torch.bfloat16, torch.bfloat16)),
    density=st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_fused_kernels_agree_with_the_reference(shape, dtypes, density, seed):
    dtype, stored = dtypes
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < density
    mask[1:-1:2] = False  # rows of which all entries are pruned
    dense = torch.randn(shape, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layout_module.TILE_ENTRIES, "cpu", 8192)
        layout = layout_of(mask, "bitmap")
        values = layout.compress(dense).to(stored)
        for tile in layout.tiles:
            part = values[tile.entries]
            results = [torch.full((tile.numel,), -7.0, dtype=dtype) for _ in range(2)]
            fused.densify(*tile.index, part, results[0])
            reference.densify(layout.positions_in(tile), part, results[1])
            assert torch.equal(*results)
            read, expected = (torch.full((tile.nnz,), -7.0, dtype=stored) for _ in range(2))
            flat = dense[tile.rows].reshape(-1)
            fused.compress(*tile.index, flat, read)
            reference.compress(layout.positions_in(tile), flat, expected)
            assert torch.equal(read, expected)


SHAPES = [(40, 130), (7, 900), (1, 3), (3, 5000), (64, 64)]


def rows_of_launches(monkeypatch, name):
    """Return the rows of each table that a kernel gets from now on."""
    rows, together = [], getattr(fused, name)

    def counted(table, owners, *types):
        rows.append(len(table))
        together(table, owners, *types)

    monkeypatch.setattr(fused, name, counted)
    return rows


@pytest.fixture
def launches(monkeypatch):
    """The rows of each table of weights that were densified together, on a CPU."""
    monkeypatch.setattr(BitmapLayout, "kernels", lambda layout, tensor: fused)
    monkeypatch.setattr(convert, "layout_of", partial(layout_of, index_format="bitmap"))
    return rows_of_launches(monkeypatch, "densify_together")


@pytest.fixture
def compressions(launches, monkeypatch):
    """The rows of each table of gradients that were compressed together, likewise."""
    return rows_of_launches(monkeypatch, "compress_together")


def pruned(compute):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, height) for height, width in SHAPES))
    masks = {name: torch.rand_like(p) < 0.3 for name, p in model.named_parameters() if p.dim() > 1}
    masks["2.weight"].zero_()
    sparsify(model, masks, compute=compute)
    return model


def train(model, steps, precision=torch.float32):
    """Return the outputs of all layers in all steps, each layer with inputs of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    generator, outputs = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for layer, (_, width) in zip(model, SHAPES, strict=True):
            inputs = torch.randn(4, width, generator=generator)
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                outputs.append(layer(inputs))
            outputs[-1].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_one_launch_a_step_fills_all_copies_that_are_in_use(launches, precision):
    expected = train(pruned("dense"), 3, precision)
    model = pruned("samo")
    for one, other in zip(train(model, 3, precision), expected, strict=True):
        assert torch.equal(one, other)
    # Without unpruned entries there is nothing to launch for; at first nothing is known of others.
    assert launches == [len(SHAPES) - 1] * 2


def test_a_copy_that_is_not_used_is_not_filled(launches):
    model = pruned("samo")
    train(model, 2)
    assert launches == [4]
    first, inputs = model[0], torch.randn(1, SHAPES[0][1])
    with torch.no_grad():
        for values in model.parameters():
            values.mul_(2)
        first(inputs)
        assert launches == [4, 4]
        for values in model.parameters():
            values.mul_(2)
        first(inputs)
    assert launches == [4, 4], "the others were not used since they were filled"
    with torch.no_grad():
        outputs = [
            layer(torch.ones(width)) for layer, (_, width) in zip(model, SHAPES, strict=True)
        ]
        for layer, output, (_, width) in zip(model, outputs, SHAPES, strict=True):
            dense = layer.weight.dense() @ torch.ones(width) + layer.bias
            torch.testing.assert_close(output, dense)


def gradients(model, layers, together=True):
    """Return the gradients of all parameters after using some layers, one after the other."""
    model.zero_grad()
    generator, losses = torch.Generator().manual_seed(1), []
    for at in layers:
        inputs = torch.randn(4, SHAPES[at][1], generator=generator)
        losses.append(model[at](inputs).square().mean())
    for loss in [sum(losses)] if together else losses:
        loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def change(model):
    """Change all weights, so that copies have to be filled again."""
    with torch.no_grad():
        for values in model.parameters():
            values.mul_(1.5)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_one_launch_compresses_the_gradients_of_a_bucket(launches, compressions, monkeypatch):
    model, expected = pruned("samo"), pruned("dense")
    every_layer = range(len(SHAPES))
    assert_same(gradients(model, every_layer), gradients(expected, every_layer))
    assert compressions == [], "at first nothing is known of the order of their use"
    change(model), change(expected)
    for _ in range(2):  # micro-batches
        assert_same(gradients(model, every_layer), gradients(expected, every_layer))
    assert compressions == [4, 4]
    separately = gradients(model, every_layer, together=False)
    assert_same(separately, gradients(expected, every_layer, together=False))
    assert compressions == [4, 4]
    assert_same(gradients(model, [1, 0, 1]), gradients(expected, [1, 0, 1]))
    assert compressions == [4, 4, 2]

    monkeypatch.setattr(copies, "BUCKET_ENTRIES", 40 * 130 + 7 * 900)
    gradients(model, every_layer)
    change(model), change(expected)
    assert_same(gradients(model, every_layer), gradients(expected, every_layer))
    assert compressions == [4, 4, 2, 4, 2], "3 x 5000 is a bucket of its own, and so is 64 x 64"


def test_buckets_have_only_weights_that_train(launches, compressions):
    model, expected = pruned("samo"), pruned("dense")
    every_layer = range(len(SHAPES))
    gradients(model, every_layer)
    for each in (model, expected):
        each[0].weight.parameter.requires_grad_(False)
        change(each)
    assert_same(gradients(model, every_layer), gradients(expected, every_layer))
    assert compressions == [3]
    for each in (model, expected):
        each[0].weight.parameter.requires_grad_(True)
    assert_same(gradients(model, every_layer), gradients(expected, every_layer))
    assert compressions == [3, 3], "the first weight has got a node of its own"


def test_weights_may_not_change_between_forward_and_backward(launches, compressions):
    model = pruned("samo")
    for _ in range(2):
        gradients(model, range(2))
        change(model)
    loss = model[0](torch.ones(1, 130)).sum() + model[1](torch.ones(1, 900)).sum()
    change(model)
    model[0](torch.ones(1, 130))  # fills the copies again
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_gradients_of_a_bucket_are_recomputed_and_differentiated(launches, compressions):
    model, expected = pruned("samo"), pruned("dense")
    for each in (model, expected):
        gradients(each, range(2))
        change(each)

    def losses(each):
        generator = torch.Generator().manual_seed(1)
        for layer, (_, width) in zip(each[:2], SHAPES, strict=False):
            inputs = torch.randn(4, width, generator=generator)
            yield checkpoint(layer, inputs, use_reentrant=False).square().mean()

    results = []
    for each in (model, expected):
        values = [layer.weight.parameter for layer in each[:2]]
        results.append(torch.autograd.grad(sum(losses(each)), values))
        first = torch.autograd.grad(sum(losses(each)), values, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        results.append(torch.autograd.grad(penalty, values))
    assert_same(results[0], results[2])
    for one, other in zip(results[1], results[3], strict=True):
        torch.testing.assert_close(one, other)
    assert compressions == [2, 2], "a differentiated gradient needs torch's operators"


def test_copies_are_filled_inside_a_transform(launches, compressions):
    model, expected = pruned("samo"), pruned("dense")
    for each in (model, expected):
        gradients(each, range(2))
        change(each)
    inputs = torch.randn(3, SHAPES[0][1])
    outputs = [torch.func.vmap(each[0])(inputs) for each in (model, expected)]
    torch.testing.assert_close(*outputs)
    assert_same(gradients(model, range(2)), gradients(expected, range(2)))


def test_a_read_weight_that_fills_the_copies_loses_no_gradient(launches, compressions):
    model, expected = pruned("samo"), pruned("dense")
    for each in (model, expected):
        gradients(each, range(2))
        change(each)
        each[0].weight.sum().item()
        functional.linear(torch.ones(1, 130), each[0].weight).sum().backward()
    assert launches == [2]
    assert_same(gradients(model, range(2)), gradients(expected, range(2)))
    assert compressions == [2]
