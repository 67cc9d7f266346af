"""Each layer type gives the numbers of the masked dense layer and holds no dense weight."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_axosparse.sparse.ops import torch_functions
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.scratch import scratch
from tests.sparse.masking import assert_same_gradients, random_masks, sparse_and_dense, unpruned


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)).relu())


class Attention(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **settings)

    def forward(self, x):
        other = x[..., : self.attention.kdim]
        return self.attention(x, other, other)[0]


class Recurrent(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x, x.flip(1), tgt_mask=torch.ones(5, 5).triu(1).bool())


class Cell(nn.Module):
    """Unrolls a recurrent cell over the sequence: its weights serve five times."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, states = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states)


class Twofold(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x.flip(1))


class Twice(nn.Module):
    """One layer serves twice in a forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Own(nn.Module):
    """A module that reads its own parameter in tensor operators, twice."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])

    def forward(self, x):
        x = torch.einsum("...i,ij->...j", x, self.matrix.tanh()) @ self.matrix
        return x @ self.parts[0] @ self.parts[1].t()


class Experts(nn.Module):
    """Reads matrix after matrix of a stack."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        return sum(x @ self.weight[expert] for expert in range(3))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


def sequence():
    return torch.randn(3, 5, 8, requires_grad=True)


def image(dimensions):
    return lambda: torch.randn(2, 4, *[6] * dimensions, requires_grad=True)


def tokens():
    return torch.randint(11, (3, 5))


LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), sequence),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), image(1)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=2)), image(2)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3), image(3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 8, 3), image(1)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 8, 3), image(2)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 4, 3), image(3)),
    "bilinear": (lambda: Twofold(nn.Bilinear(8, 8, 4)), sequence),
    "transformers_conv1d": (lambda: nn.Sequential(Conv1D(16, 8), Conv1D(8, 16)), sequence),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4)), tokens),
    "embedding_sparse": (lambda: nn.Embedding(11, 8, sparse=True), tokens),
    "embedding_bag": (lambda: nn.EmbeddingBag(11, 8), tokens),
    "tied": (Tied, tokens),
    "attention": (Attention, sequence),
    "attention_separate": (lambda: Attention(kdim=6, vdim=6), sequence),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), sequence),
    "decoder": (Decoder, sequence),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 6, 2, bidirectional=True)), sequence),
    "lstm_projected": (lambda: Recurrent(nn.LSTM(8, 6, proj_size=3)), sequence),
    "gru": (lambda: Recurrent(nn.GRU(8, 6, batch_first=True)), sequence),
    "rnn": (lambda: Recurrent(nn.RNN(8, 6)), sequence),
    "lstm_cell": (lambda: Cell(nn.LSTMCell(8, 6)), sequence),
    "gru_cell": (lambda: Cell(nn.GRUCell(8, 6)), sequence),
    "rnn_cell": (lambda: Cell(nn.RNNCell(8, 6)), sequence),
    "twice": (Twice, sequence),
    "own": (Own, sequence),
    "experts": (Experts, sequence),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), sequence),
    "checkpoint_reentrant": (lambda: Checkpointed(use_reentrant=True), sequence),
    "weight_norm": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
        sequence,
    ),
}
DIRECT = {"linear", "transformers_conv1d", "twice", "checkpoint", "checkpoint_reentrant"}
layer_types = pytest.mark.parametrize("name", [name for name in LAYERS if name != "experts"])
"""Experts have tests of their own."""


def build(name):
    torch.manual_seed(1)
    make, make_inputs = LAYERS[name]
    module, inputs = make(), make_inputs()
    return module, inputs, random_masks(module)


def run(module, inputs):
    inputs.grad = None
    output = module(inputs)
    output.square().sum().backward()
    return output, inputs.grad


@layer_types
def test_output_and_gradients(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    for one, other in zip(run(sparse, inputs), run(dense, inputs), strict=True):
        torch.testing.assert_close(one, other)
    assert_same_gradients(sparse, dense, masks)


@layer_types
def test_evaluation(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module.eval(), masks)
    with torch.no_grad():
        torch.testing.assert_close(sparse(inputs), dense(inputs))


CALLED = {
    "input": [
        (nn.Linear(8, 4), sequence),
        (nn.Conv2d(4, 8, 3), image(2)),
        (nn.Embedding(11, 8), tokens),
    ],
    "x": [(Conv1D(16, 8), sequence)],
}


@pytest.mark.parametrize("compute", ["sparse", "dense"])
@pytest.mark.parametrize("argument", CALLED)
def test_a_layer_is_called_by_keyword(argument, compute):
    for layer, make_inputs in CALLED[argument]:
        layer = copy.deepcopy(layer)
        sparse, dense = sparse_and_dense(layer, random_masks(layer), compute)
        inputs = make_inputs()
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                torch.testing.assert_close(sparse(**{argument: inputs}), dense(inputs))
        with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
            sparse(rows=inputs)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            sparse()


@pytest.fixture
def made(monkeypatch):
    """The dtype of all that was materialized, and the storage of what is not in scratch memory."""
    made = []
    densify = Layout.densify_tile

    def watched(layout, tile, values, out):
        densify(layout, tile, values, out)
        storage = out.untyped_storage()
        reused = scratch.take("tile", 0, out.dtype, out.device).untyped_storage()
        whole = storage.data_ptr() != reused.data_ptr()
        made.append((out.dtype, StorageWeakRef(storage) if whole else None))

    monkeypatch.setattr(Layout, "densify_tile", watched)
    return made


def whole(made):
    return [storage for _, storage in made if storage is not None]


def alive(made):
    return [storage for storage in whole(made) if not storage.expired()]


@layer_types
@pytest.mark.parametrize("saving", [nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("large", [False, True])
def test_no_dense_weight_between_forward_and_backward(name, large, saving, made, monkeypatch):
    monkeypatch.setattr(torch_functions, "MIN_ENTRIES", 0 if large else 2**18)
    never_whole = name in DIRECT
    module, inputs, masks = build(name)
    sparse, _ = sparse_and_dense(module, masks)
    with saving():
        loss = sparse(inputs).square().sum()
    assert made
    assert not alive(made)
    loss.backward()
    assert bool(whole(made)) is not never_whole
    assert not alive(made)


@layer_types
def test_deep_copy_and_pickle(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    run(sparse, inputs)
    expected, _ = run(dense, inputs)
    copies = [copy.deepcopy(sparse)]
    if name != "weight_norm":  # torch refuses to pickle any module with parametrizations
        copies.append(pickle.loads(pickle.dumps(sparse)))
    for one in copies:
        torch.testing.assert_close(run(one, inputs)[0], expected)
        assert {n: p.shape for n, p in one.named_parameters()} == {
            n: p.shape for n, p in sparse.named_parameters()
        }


@pytest.mark.parametrize("name", ["linear", "attention", "own", "lstm"])
def test_functional_call_takes_values_and_dense_tensors(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    values = {n: p.detach() * 2 for n, p in sparse.named_parameters()}
    tensors = {n: p.detach() * 2 for n, p in dense.named_parameters()}
    expected = torch.func.functional_call(dense, tensors, (inputs,))
    torch.testing.assert_close(torch.func.functional_call(sparse, values, (inputs,)), expected)
    torch.testing.assert_close(torch.func.functional_call(sparse, tensors, (inputs,)), expected)


@pytest.mark.parametrize("name", ["linear", "conv2d", "tied"])
def test_compiled_whole_without_saving_a_dense_weight(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    saved = []

    def noted(tensor):
        saved.append(sorted(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        output = compiled(inputs)
    output.square().sum().backward()
    assert saved
    for mask in masks.values():
        assert sorted(mask.shape) not in saved
        assert [mask.numel()] not in saved
    torch.testing.assert_close(output, run(dense, inputs)[0])
    assert_same_gradients(sparse, dense, masks)


@layer_types
def test_state_goes_out_dense_and_comes_back(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    state = copy.deepcopy(sparse.state_dict())
    torch.testing.assert_close(state, dense.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter.zero_()
    sparse.load_state_dict(state)
    torch.testing.assert_close(run(sparse, inputs)[0], run(dense, inputs)[0])


AUTOCAST = ["linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "transformers_conv1d"]
AUTOCAST += ["attention", "encoder", "decoder", "twice", "checkpoint", "checkpoint_reentrant"]


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_makes_no_float32_copy(name, made):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    outputs = []
    for one in (sparse, dense):
        # The cache would add the gradients of several uses in bfloat16.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            outputs.append(one(inputs))
        outputs[-1].float().square().sum().backward()
    torch.testing.assert_close(*outputs)
    assert {dtype for dtype, _ in made} == {torch.bfloat16}
    assert_same_gradients(sparse, dense, masks)


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_in_evaluation(name, no_gradients):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    sparse.eval()  # There is no dropout, and the dense encoder's fast path returns float32.
    with no_gradients(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(sparse(inputs), dense(inputs))


@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_is_taken(padded, monkeypatch):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module, inputs = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    sparse, dense = sparse_and_dense(module, random_masks(module))
    taken = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: (taken.append(1), fast(*a))[1]
    )
    padding = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [2]]) if padded else None
    with torch.no_grad():
        outputs = [one(inputs, src_key_padding_mask=padding) for one in (sparse, dense)]
    torch.testing.assert_close(*outputs)
    assert len(taken) == 4  # two layers of each


TRANSFORMED = ["linear", "conv2d", "attention", "transformers_conv1d", "twice", "own"]


@pytest.mark.parametrize("name", TRANSFORMED)
def test_double_backward(name):
    module, inputs, masks = build(name)
    sparse, dense = (one.double() for one in sparse_and_dense(module, masks))
    inputs = inputs.detach().double().requires_grad_()
    found = []
    for one in (sparse, dense):
        (slope,) = torch.autograd.grad(one(inputs).pow(3).sum(), inputs, create_graph=True)
        slope.square().sum().backward()
        found.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    expected = {n: unpruned(n, gradient, masks) for n, gradient in found[1].items()}
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_functional_gradients_of_a_batch_and_of_each_sample(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)

    def gradients(one):
        values = {n: p.detach() for n, p in one.named_parameters()}

        def loss(values, x):
            return torch.func.functional_call(one, values, (x,)).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))
        return torch.func.grad(loss)(values, inputs), each(values, inputs.unsqueeze(1).detach())

    for found, expected in zip(gradients(sparse), gradients(dense), strict=True):
        for n, gradient in expected.items():
            if n in masks:
                gradient = gradient[..., masks[n]]
            torch.testing.assert_close(found[n], gradient)


def test_an_ensemble_of_values_shares_one_mask():
    module, inputs, masks = build("linear")
    sparse, _ = sparse_and_dense(module, masks)
    several = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in sparse.named_parameters()}

    def call(values):
        return torch.func.functional_call(sparse, values, (inputs,))

    outputs = torch.func.vmap(call)(several)
    for number, output in enumerate(outputs):
        torch.testing.assert_close(output, call({n: v[number] for n, v in several.items()}))


@pytest.mark.parametrize("through", ["the parameter", "the weight as it reads"])
@pytest.mark.parametrize(
    "name", ["linear", "conv2d", "attention", "lstm", "tied", "own", "experts"]
)
def test_a_change_between_forward_and_backward_is_detected(name, through):
    module, inputs, masks = build(name)
    sparse, _ = sparse_and_dense(module, masks)
    loss = sparse(inputs).square().sum()
    parameters = dict(sparse.named_parameters())
    with torch.no_grad():
        for parameter_name in masks:
            owner, _, attribute = parameter_name.rpartition(".")
            read = getattr(sparse.get_submodule(owner), attribute)
            (parameters[parameter_name] if through == "the parameter" else read).add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
