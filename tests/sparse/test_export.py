"""The dense form of a pruned model goes through torch's exporters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_axosparse import Ticket, densify, sparsify

MODELS = {
    "convolutions": (
        [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 8)],
        torch.randn(2, 3, 8, 8),
    ),
    "transformer": (
        [
            nn.Embedding(50, 32),
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            nn.Linear(32, 50),
        ],
        torch.randint(0, 50, (2, 7)),
    ),
}


@pytest.fixture(params=MODELS)
def pruned(request: pytest.FixtureRequest):
    """A densified model, its input, and what its sparse form gives."""
    layers, inputs = MODELS[request.param]
    model = copy.deepcopy(nn.Sequential(*layers)).eval()
    sparsify(model, Ticket.magnitude(model, 0.9).masks)
    with torch.no_grad():
        expected = model(inputs)
    densify(model)
    return model, inputs, expected


def test_torch_exports_it(pruned):
    model, inputs, expected = pruned
    exported = torch.export.export(model, (inputs,))
    torch.testing.assert_close(exported.module()(inputs), expected, atol=1e-5, rtol=1e-5)


def test_onnx_computes_the_same(pruned):
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model, inputs, expected = pruned
    onnx = ReferenceEvaluator(torch.onnx.export(model, (inputs,), verbose=False).model_proto)
    (outputs,) = onnx.run(None, {onnx.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), expected, atol=1e-5, rtol=1e-5)
