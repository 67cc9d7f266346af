"""LSTM and GRU on kept values against torch's layers with the same, masked weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.sparse import kept_recurrent, sparsify
from lightning_axosparse.sparse.kept_recurrent import LIMITS, Steps, Weights
from lightning_axosparse.sparse.layout import Layout
from lightning_axosparse.sparse.module import SparseModule
from lightning_axosparse.sparse.recurrent_cells import GRU, LSTM
from tests.sparse.masking import apply_masks, kept, random_masks

KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU}
WIDTH, UNITS, SEQUENCES, STEPS = 70, 66, 3, 5
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "no biases": {"bias": False},
    "batch first": {"batch_first": True},
    "both directions": {"bidirectional": True},
    "layers": {"num_layers": 3, "dropout": 0.4, "bidirectional": True},
}


def packed(inputs: Tensor) -> PackedSequence:
    return pack_padded_sequence(inputs, [2, STEPS, 1], enforce_sorted=False)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "padded": lambda inputs: inputs,
    "packed": packed,
    "unbatched": lambda inputs: inputs[:, 1],
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ran on kept values."""
    calls: list[Any] = []
    run = kept_recurrent.run
    monkeypatch.setattr(kept_recurrent, "run", lambda *args: calls.append(args) or run(*args))
    return calls


@pytest.fixture
def densified(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the weights of which a part was made dense, or read from dense."""
    shapes: list[torch.Size] = []
    for name in ("densify_tile", "compress_tile"):
        function = getattr(Layout, name)

        def counted(layout: Layout, *args: Any, function: Any = function) -> None:
            shapes.append(layout.shape)
            function(layout, *args)

        monkeypatch.setattr(Layout, name, counted)
    return shapes


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in float64 run here, too; their products run on panels."""
    monkeypatch.setattr(kept_recurrent, "chosen", lambda *_: True)


def layers(
    kind: Any, dtype: torch.dtype = torch.float32, pruned: str = "weight", **options: Any
) -> tuple[Any, Any, dict[str, Tensor]]:
    """A layer that is stored sparse, the dense one with masked weights, and the masks."""
    torch.manual_seed(0)
    sparse = kind(WIDTH, UNITS, dtype=dtype, **options)
    masks = {name: mask for name, mask in random_masks(sparse).items() if pruned in name}
    dense = copy.deepcopy(sparse)
    apply_masks(dense, masks)
    sparsify(sparse, masks, compute="sparse")
    return sparse, dense, masks


def first_state(layer: Any, dtype: torch.dtype, *sequences: int) -> Any:
    shape = layer.num_layers * (1 + layer.bidirectional), *sequences, UNITS
    hidden, cell = torch.randn(2, *shape, dtype=dtype).requires_grad_().unbind()
    return (hidden, cell) if isinstance(layer, nn.LSTM) else hidden


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = [value.data] if isinstance(value, PackedSequence) else value
    return [tensor for part in parts for tensor in tensors_of(part)]


def results(
    layer: Any, form: str, inputs: Tensor, first: Any, masks: dict[str, Tensor]
) -> list[Tensor]:
    """Outputs, last states and the gradients of inputs, first states and parameters."""
    torch.manual_seed(1)
    outputs = tensors_of(layer(FORMS[form](inputs), first))
    loss = torch.stack([(output * torch.randn_like(output)).sum() for output in outputs]).sum()
    named = dict(layer.named_parameters())
    sources = [inputs, *([] if first is None else tensors_of(first)), *named.values()]
    gradients = torch.autograd.grad(loss, sources)
    others, of_parameters = gradients[: -len(named)], gradients[-len(named) :]
    compressed = [
        gradient if isinstance(layer, SparseModule) else kept(name, gradient, masks)
        for name, gradient in zip(named, of_parameters, strict=True)
    ]
    return [*outputs, *others, *compressed]


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def random_inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(STEPS, SEQUENCES, WIDTH, dtype=dtype, requires_grad=True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_and_gradients_are_those_of_torch(kind, options, form, dtype, runs):
    sparse, dense, masks = layers(kind, dtype, **OPTIONS[options])
    inputs = random_inputs(dtype)
    if form == "packed" and sparse.batch_first:
        sparse.batch_first = dense.batch_first = False  # which then concerns the padding alone
    sequences = () if form == "unbatched" else (SEQUENCES if not sparse.batch_first else STEPS,)
    for first in (None, first_state(sparse, dtype, *sequences)):
        both = [results(layer, form, inputs, first, masks) for layer in (sparse, dense)]
        assert_equal(*both, TOLERANCE[dtype])
    assert len(runs) == 2 * sparse.num_layers * (1 + sparse.bidirectional)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    reverse=st.booleans(),
    gru=st.booleans(),
)
def test_any_lengths_of_sequences(lengths, reverse, gru):
    torch.manual_seed(0)
    lengths = sorted(lengths, reverse=True)
    options = {"bidirectional": True, "dtype": torch.float64}
    layer = nn.GRU(3, 4, **options) if gru else nn.LSTM(3, 4, **options)
    cell, suffix = GRU if gru else LSTM, "l0_reverse" if reverse else "l0"
    inputs = torch.randn(max(lengths), len(lengths), 3, dtype=torch.float64, requires_grad=True)
    sequences = pack_padded_sequence(inputs, lengths)
    outputs, last = layer(sequences)
    expected = (
        outputs.data[:, 4 * reverse :][:, :4],
        *(part[int(reverse)] for part in tensors_of([last])),
    )
    parameters = [
        getattr(layer, f"{name}_{suffix}")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    first = tuple(torch.zeros(len(lengths), 4, dtype=torch.float64) for _ in range(cell.states))
    steps = Steps(sequences.batch_sizes.tolist(), reverse)
    rows, state = kept_recurrent.run(cell, steps, sequences.data, first, Weights(*parameters))
    found = rows, *state
    assert_equal(found, expected, 1e-12)
    factors = [torch.randn_like(one) for one in found]
    gradients = [
        torch.autograd.grad(some, (inputs, *parameters), factors, retain_graph=True)
        for some in (found, expected)
    ]
    assert_equal(*gradients, 1e-12)


def test_no_weight_is_made_dense(kind, densified, runs):
    sparse, _, _ = layers(kind, num_layers=2, bidirectional=True)
    densified.clear()
    outputs, _ = sparse(random_inputs())
    outputs.sum().backward()
    with torch.no_grad():
        sparse(random_inputs()[:1, :1])
    assert densified == []
    assert len(runs) == 8


def test_without_gradients_nothing_else_comes_out(kind, runs):
    sparse, _, _ = layers(kind, num_layers=2)
    inputs = random_inputs()
    trained = tensors_of(sparse(inputs))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert all(map(torch.equal, tensors_of(sparse(inputs)), trained))
    assert len(runs) == 6


@pytest.mark.parametrize("pruned", ["weight_hh", "weight_ih", "l1"])
def test_some_weights_may_be_dense(kind, pruned, runs):
    sparse, dense, masks = layers(kind, pruned=pruned, num_layers=2)
    inputs = random_inputs()
    both = [results(layer, "padded", inputs, None, masks) for layer in (sparse, dense)]
    assert_equal(*both, 1e-5)
    assert len(runs) == 2


def test_narrow_inputs_are_multiplied_with_panels(kind, runs, densified):
    torch.manual_seed(0)
    sparse = kind(7, UNITS)
    masks = random_masks(sparse)
    dense = copy.deepcopy(sparse)
    apply_masks(dense, masks)
    sparsify(sparse, masks, compute="sparse")
    densified.clear()
    inputs = torch.randn(STEPS, SEQUENCES, 7, requires_grad=True)
    both = [results(layer, "padded", inputs, None, masks) for layer in (sparse, dense)]
    assert_equal(*both, 1e-5)
    assert runs
    assert set(densified) == {sparse.weight_ih_l0.shape}


def test_frozen_parameters_and_inputs_without_gradients(kind, runs):
    sparse, dense, masks = layers(kind)
    gradients = []
    for layer in (sparse, dense):
        parameters = dict(layer.named_parameters())
        for name in ("weight_hh_l0", "bias_ih_l0"):
            parameters.pop(name).requires_grad_(False)
        torch.manual_seed(1)
        layer(random_inputs().detach())[0].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in parameters.items()})
    found, expected = gradients
    assert_equal(found.values(), (kept(*named, masks) for named in expected.items()), 1e-5)
    assert {name for name, p in sparse.named_parameters() if p.grad is not None} == found.keys()
    assert len(runs) == 1


def test_the_dropped_numbers_are_those_of_torch(kind, runs):
    sparse, dense, _ = layers(kind, num_layers=2, dropout=0.5, batch_first=True)
    inputs = random_inputs()
    outputs = []
    for layer in (sparse, dense):
        torch.manual_seed(3)
        outputs.append([layer(inputs)[0], torch.rand(1)])  # and so is the generator afterwards
    assert_equal(*outputs, 1e-5)
    sparse.eval()
    assert not torch.equal(sparse(inputs)[0], outputs[0][0])
    assert len(runs) == 4


def test_recomputation_gives_the_same_gradients(kind):
    sparse, _, _ = layers(kind, num_layers=2, dropout=0.5)
    inputs, gradients = random_inputs(), []
    for recomputes in (False, True):
        torch.manual_seed(3)
        call = (lambda x: checkpoint(sparse, x, use_reentrant=False)) if recomputes else sparse
        loss = call(inputs)[0].square().sum()
        gradients.append(torch.autograd.grad(loss, [inputs, *sparse.parameters()]))
    assert all(map(torch.equal, *gradients))


@pytest.mark.usefixtures("always")
def test_double_backward(kind, runs):
    """Of states, too, that depend on the inputs; torch's LSTM has it only without oneDNN."""
    sparse, dense, masks = layers(kind, torch.float64, num_layers=2)
    inputs, given = random_inputs(torch.float64), first_state(sparse, torch.float64, SEQUENCES)
    found = []
    for layer in (sparse, dense):
        factor = inputs.sum()
        first = tuple(s * factor for s in given) if isinstance(given, tuple) else given * factor
        with torch.backends.mkldnn.flags(enabled=False):
            outputs, _ = layer(inputs, first)
        (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        named = dict(layer.named_parameters())
        second = torch.autograd.grad(gradient.square().sum(), [inputs, *named.values()])
        of_parameters = zip(named, second[1:], strict=True)
        plain = [g if layer is sparse else kept(name, g, masks) for name, g in of_parameters]
        found.append([gradient, second[0], *plain])
    assert_equal(*found, 1e-12)
    assert len(runs) == 2


def test_batched_gradients(kind, runs):
    sparse, _, _ = layers(kind)
    inputs = random_inputs()
    outputs, _ = sparse(inputs)
    several = torch.randn(2, *outputs.shape)
    batched = torch.autograd.grad(
        outputs, inputs, several, retain_graph=True, is_grads_batched=True
    )[0]
    one_by_one = [torch.autograd.grad(outputs, inputs, g, retain_graph=True)[0] for g in several]
    assert_equal(batched, one_by_one, 1e-5)
    assert len(runs) == 1


def test_values_that_change_before_backward_are_an_error(kind):
    sparse, _, _ = layers(kind)
    outputs, _ = sparse(random_inputs())
    with torch.no_grad():
        dict(sparse.named_parameters())["weight_hh_l0"].add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        outputs.sum().backward()


def test_what_kept_values_do_not_serve_runs_on_dense_weights(kind, runs):
    sparse, dense, _ = layers(kind)
    inputs = random_inputs()
    of_sparse, of_dense = (
        torch.func.grad(lambda x, layer=layer: layer(x)[0].square().sum())(inputs)
        for layer in (sparse, dense)
    )
    assert_equal([of_sparse], [of_dense], 1e-5)
    assert_equal(sparse.double()(inputs.double())[:1], dense.double()(inputs.double())[:1], 1e-12)
    sparse.float()
    with torch.autocast("cpu", torch.bfloat16):
        sparse(inputs)
    assert runs == []
    sparse(inputs)
    assert len(runs) == 1


def test_projections_run_on_dense_weights(runs):
    sparse, dense, masks = layers(nn.LSTM, proj_size=65)
    inputs = random_inputs()
    both = [results(layer, "padded", inputs, None, masks) for layer in (sparse, dense)]
    assert_equal(*both, 1e-5)
    assert runs == []


def test_mistakes_are_told_as_torch_tells_them(kind, runs):
    sparse, _, _ = layers(kind)
    with pytest.raises(RuntimeError, match=r"input.size"):
        sparse(torch.ones(STEPS, SEQUENCES, WIDTH + 1))
    assert runs == []


def matrices(kind: Any, units: int, of_inputs: float, of_state: float, **options: Any) -> Any:
    layer = kind(units, units, bias=False)
    masks = {
        f"weight_{name}_l0": torch.rand(layer.weight_ih_l0.shape) < share
        for name, share in (("ih", of_inputs), ("hh", of_state))
        if share < 1
    }
    sparsify(layer, masks, **options)
    return [Weights(*layer._flat_weights)]


@pytest.mark.parametrize("cell", LIMITS)
def test_what_auto_chooses(cell):
    kind = KINDS[cell.__name__]
    most, units = LIMITS[cell].most_kept, max(LIMITS[cell].fewest_units, 64)
    few, many = most - 0.05, most + 0.1
    options = itertools.product((few, many, 1.0), (few, many))
    found = [
        shares for shares in options if kept_recurrent.chosen(cell, matrices(kind, units, *shares))
    ]
    assert found == [(few, few)]
    with torch.inference_mode():
        small = LIMITS[cell].fewest_in_inference - 1
        assert not kept_recurrent.chosen(cell, matrices(kind, small, few, few))
        assert kept_recurrent.chosen(cell, matrices(kind, small + 1, few, few))
    assert not kept_recurrent.chosen(cell, matrices(kind, units - 1, few, few))
    assert not kept_recurrent.chosen(cell, matrices(kind, units, few, few, compute="dense"))
    assert kept_recurrent.chosen(cell, matrices(kind, 64, many, many, compute="sparse"))
    assert not kept_recurrent.chosen(cell, matrices(kind, units, few, few, policy="samo"))
    assert not kept_recurrent.chosen(cell, matrices(kind, units, few, few, index_format="coo"))
