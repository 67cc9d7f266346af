"""What ``test_kernels.py`` runs in Triton's interpreter: the fused kernels and the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.kernels import fused, reference
from lightning_axosparse.sparse.module import convert
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


@pytest.fixture
def launches(monkeypatch):
    """The rows of each table of weights that were densified together, on a CPU."""
    rows, together = [], fused.densify_together

    def counted(table, owners, *types):
        rows.append(len(table))
        together(table, owners, *types)

    monkeypatch.setattr(fused, "densify_together", counted)
    monkeypatch.setattr(BitmapLayout, "kernels", lambda layout, tensor: fused)
    monkeypatch.setattr(convert, "layout_of", partial(layout_of, index_format="bitmap"))
    return rows


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
