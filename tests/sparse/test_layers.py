"""Each layer type gives the numbers of its masked dense twin and holds no dense weight."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.sparse.kernels import reference
from tests.sparse.masking import kept, random_masks, sparse_and_dense


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


class Own(nn.Module):
    """A module that reads its own parameter in tensor operators, twice."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])

    def forward(self, x):
        x = torch.einsum("...i,ij->...j", x, self.matrix.tanh()) @ self.matrix
        return x @ self.parts[0] @ self.parts[1].t()


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
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 8, 3), image(2)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4)), tokens),
    "embedding_sparse": (lambda: nn.Embedding(11, 8, sparse=True), tokens),
    "embedding_bag": (lambda: nn.EmbeddingBag(11, 8), tokens),
    "tied": (Tied, tokens),
    "attention": (Attention, sequence),
    "attention_separate": (lambda: Attention(kdim=6, vdim=6), sequence),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), sequence),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 6, 2, bidirectional=True)), sequence),
    "lstm_projected": (lambda: Recurrent(nn.LSTM(8, 6, proj_size=3)), sequence),
    "gru": (lambda: Recurrent(nn.GRU(8, 6, batch_first=True)), sequence),
    "rnn": (lambda: Recurrent(nn.RNN(8, 6)), sequence),
    "own": (Own, sequence),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), sequence),
    "checkpoint_reentrant": (lambda: Checkpointed(use_reentrant=True), sequence),
    "weight_norm": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
        sequence,
    ),
}
layer_types = pytest.mark.parametrize("name", LAYERS)


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
    expected = dict(dense.named_parameters())
    for parameter_name, parameter in sparse.named_parameters():
        gradient = expected[parameter_name].grad
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        torch.testing.assert_close(parameter.grad, kept(parameter_name, gradient, masks))


@layer_types
def test_evaluation(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module.eval(), masks)
    with torch.no_grad():
        torch.testing.assert_close(sparse(inputs), dense(inputs))


@layer_types
def test_no_dense_weight_lives_between_forward_and_backward(name, monkeypatch):
    made = []
    densify = reference.densify

    def watched(*args):
        dense = densify(*args)
        made.append(StorageWeakRef(dense.untyped_storage()))
        return dense

    module, inputs, masks = build(name)
    sparse, _ = sparse_and_dense(module, masks)
    monkeypatch.setattr(reference, "densify", watched)
    loss = sparse(inputs).square().sum()
    assert made
    assert all(storage.expired() for storage in made)
    loss.backward()
    assert all(storage.expired() for storage in made)


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
def test_compiled_whole(name):
    module, inputs, masks = build(name)
    sparse, dense = sparse_and_dense(module, masks)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, inputs)[0], run(dense, inputs)[0])
    expected = dict(dense.named_parameters())
    for parameter_name, parameter in sparse.named_parameters():
        gradient = kept(parameter_name, expected[parameter_name].grad, masks)
        torch.testing.assert_close(parameter.grad, gradient)


def test_saved_on_cpu():
    module, inputs, masks = build("linear")
    sparse, dense = sparse_and_dense(module, masks)
    with torch.autograd.graph.save_on_cpu():
        output = sparse(inputs)
    output.square().sum().backward()
    run(dense, inputs)
    for name, parameter in sparse.named_parameters():
        gradient = dict(dense.named_parameters())[name].grad
        assert torch.equal(parameter.grad, kept(name, gradient, masks))
