"""Layers that are recomputed give the same gradients, to the bit, from less that is kept."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, sparsify
from lightning_axosparse.pipeline.backward.recompute import ActivationCheckpointing, Segment
from tests.memory import Storages
from tests.parity.cases import Net, difference, fit, trainer
from tests.pipeline.test_pipeline import pipeline, train

CPU = torch.device("cpu")
WIDTH, LAYERS = 8, 6


class Block(nn.Module):
    """Wide inside, random, with running means, and called with a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.up(self.norm(x))) * torch.linspace(0.1, 0.9, 4 * WIDTH)
        return x + self.dropout(self.down(hidden)) * mask


class Descending(Block):
    """Takes a step down the gradient of an energy, which it differentiates itself."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        x = super().forward(x, mask=mask)
        energy = torch.tanh(self.up(x)).pow(2).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * gradient


class Stack(nn.Module):
    """Hands most blocks what the one before returned, two of them something else."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=mask)
            if index == 1:
                x = 2 * torch.sin(x)
            if index == 4:
                x.mul_(0.5)
        return x


def gradients(
    model: Stack, stages: int, every: Any, context: Any = nullcontext
) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    checkpointing = None if every is None else ActivationCheckpointing(every, CPU)
    pipe, layers = pipeline(model.layers, stages, checkpointing=checkpointing)

    def step(batch: Any) -> Tensor:
        with context():
            return model(*batch).float().pow(2).mean()

    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(16, WIDTH, generator=generator), torch.rand(16, 1, generator=generator)
    batch = tuple(tensor.to(next(model.parameters()).dtype) for tensor in batch)
    train(pipe, step, batch, 4, parted=True)
    layers.uninstall()
    calls = {layer.calls for layer in model.layers}
    assert calls == {4 if every is None else 8}
    drawn = {"drawn": torch.rand(1)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return [p.grad for p in model.parameters()], buffers | drawn


@pytest.mark.parametrize("every", [1, 2, 4, 6, "sqrt"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("block", [Block, Descending])
def test_gradients_buffers_and_random_numbers_are_the_same_to_the_bit(
    block: type[Block], stages: int, every: Any
) -> None:
    model = Stack(block)
    expected, kept = gradients(model, stages, None)
    actual, also_kept = gradients(model, stages, every)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(also_kept[name], value) for name, value in kept.items())


def test_a_segment_is_recomputed_under_the_autocast_and_dtype_of_the_first_pass() -> None:
    class Double:
        """Lightning's precision="64-true" around a step, which is over when backward begins."""

        def __enter__(self) -> None:
            torch.set_default_dtype(torch.float64)

        def __exit__(self, *_: object) -> None:
            torch.set_default_dtype(torch.float32)

    for model, context in (
        (Stack(), lambda: torch.autocast("cpu", torch.bfloat16)),
        (Stack().double(), Double),
    ):
        expected, _ = gradients(model, 2, None, context)
        actual, _ = gradients(model, 2, 2, context)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_sparse_weights_are_recomputed() -> None:
    model = Stack()
    masks = {name: torch.rand_like(p) > 0.7 for name, p in model.named_parameters() if p.dim() == 2}
    sparsify(model, masks)
    expected, _ = gradients(model, 2, None)
    actual, _ = gradients(model, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    sizes = {name: g.shape for (name, _), g in zip(model.named_parameters(), actual, strict=True)}
    assert all(sizes[name] == (mask.sum(),) for name, mask in masks.items())


@pytest.mark.parametrize(
    ("g_inter", "precision"), [(1, "32-true"), (2, "64-true"), (2, "bf16-mixed")]
)
def test_a_run_is_the_same_to_the_bit(g_inter: int, precision: Any) -> None:
    records = []
    for recompute in (None, 2):
        strategy = AxoSparseStrategy(
            g_inter=g_inter, microbatches=4, transport="loopback", recompute=recompute
        )
        L.seed_everything(0, verbose=False)
        records.append(fit(trainer(strategy, precision=precision, max_epochs=1), Net(outer=True)))
    assert difference(*records) == 0.0


def bytes_kept(every: int | None) -> int:
    """What lives between forward and backward, of a chain of layers with wide insides."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
        for _ in range(8)
    ]
    x = torch.randn(32, 4, requires_grad=True)
    with Storages([x, *(p for layer in layers for p in layer.parameters())]) as storages:
        segment = Segment(CPU)
        for index, layer in enumerate(layers):
            if every is None:
                x = layer(x)
                continue
            if index % every == 0:
                segment = Segment(CPU)
            x = segment.run(str(index), layer, layer.forward, (x,), {})
        kept = storages.live_bytes()
        x.sum().backward()
    return kept


def test_only_the_first_input_of_a_segment_is_kept() -> None:
    activation = 32 * 4 * 4
    assert bytes_kept(None) >= 8 * 4 * 16 * activation, "four wide tensors a layer"
    for every in (1, 2, 4, 8):
        # The inputs of the segments after the first, and the output.
        assert bytes_kept(every) == 8 // every * activation


def test_where_segments_begin() -> None:
    begins = [ActivationCheckpointing("sqrt", CPU).begins_segment(i, 7) for i in range(7)]
    assert [index for index, begin in enumerate(begins) if begin] == [0, 3, 6]
    assert [ActivationCheckpointing(2, CPU).begins_segment(i, 3) for i in range(3)] == [
        True,
        False,
        True,
    ]
    assert [ActivationCheckpointing("sqrt", CPU).begins_segment(i, 1) for i in range(1)] == [True]


class Caching(nn.Module):
    """Does something else when it is called again, as a layer with a cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.cache.append(x)
        return self.linear(torch.cat(self.cache)).tanh() * scale


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (torch.ones(1), r"\['h.3'\] saved . tensors .* or of other shapes"),
        (torch.ones(2, 1), "'h.3' was computed once, but recomputing it .* RuntimeError: The size"),
    ],
)
def test_a_layer_that_does_something_else_the_second_time_is_refused(
    scale: Tensor, words: str
) -> None:
    layer, segment = Caching(), Segment(CPU)
    output = segment.run("h.3", layer, layer.forward, (torch.randn(2, 4), scale), {})
    with pytest.raises(RuntimeError, match=rf"{words}.*use_cache=False"):
        output.sum().backward()


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    layer, segment, x = nn.Linear(4, 4), Segment(CPU), torch.randn(2, 4)
    output = segment.run("h.3", layer, layer.forward, (x,), {}).tanh()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"'h.3', of shape \(2, 4\), was changed in place"):
        output.sum().backward()


class Changing(nn.Linear):
    """Changes an attribute of the object that it is given."""

    def forward(self, x: Any) -> Any:
        x.hidden = super().forward(x.hidden)
        return x


def test_a_layer_that_changes_an_object_is_refused() -> None:
    layer, given = Changing(WIDTH, WIDTH), SimpleNamespace(hidden=torch.randn(2, WIDTH))
    with pytest.raises(MisconfigurationException, match="'0' changes attributes of a SimpleName"):
        Segment(CPU).run("0", layer, layer, (given,), {})


def test_backward_may_go_through_a_segment_twice() -> None:
    layer, segment = Block(), Segment(CPU)
    args, mask = (torch.randn(5, WIDTH),), {"mask": torch.ones(5, 1)}
    output = segment.run("h.0", layer, layer.forward, args, mask)
    first = torch.autograd.grad(output.sum(), layer.up.weight, retain_graph=True)
    second = torch.autograd.grad(output.sum(), layer.up.weight)
    assert torch.equal(first[0], second[0])
    assert layer.calls == 3
