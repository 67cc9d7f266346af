from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse.pruning.channels.layers import (
    keep_inputs,
    keep_outputs,
    layer_inputs,
    layer_outputs,
    validate_channelwise_optimizer,
)

LAYERS = {
    nn.Conv1d: (nn.Conv1d(5, 4, 3), (2, 5, 3)),
    nn.Conv2d: (nn.Conv2d(5, 4, 3), (2, 5, 3, 3)),
    nn.Conv3d: (nn.Conv3d(5, 4, 2), (2, 5, 2, 2, 2)),
    nn.ConvTranspose1d: (nn.ConvTranspose1d(5, 4, 3), (2, 5, 3)),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(5, 4, 3), (2, 5, 3, 3)),
    nn.ConvTranspose3d: (nn.ConvTranspose3d(5, 4, 2), (2, 5, 2, 2, 2)),
    nn.Linear: (nn.Linear(5, 4), (2, 5)),
}
INPUTS = torch.tensor([True, False, True, True, False])
OUTPUTS = torch.tensor([False, True, True, False])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_its_kept_outputs_of_its_kept_inputs(kind: type[nn.Module]) -> None:
    layer, shape = LAYERS[kind]
    layer = layer.double()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    x = torch.randn(shape, dtype=torch.float64)
    layer(x).square().sum().backward()
    optimizer.step()
    x[:, ~INPUTS] = 0
    expected = layer(x)[:, OUTPUTS]
    moments = [optimizer.state[p]["momentum_buffer"].clone() for p in layer.parameters()]
    keep_inputs(layer, INPUTS, [optimizer])
    keep_outputs(layer, OUTPUTS, [optimizer])
    assert (layer_inputs(layer), layer_outputs(layer)) == (3, 2)
    assert torch.allclose(layer(x[:, INPUTS]), expected, rtol=0, atol=1e-12)
    assert layer.weight.is_leaf
    for parameter, moment in zip(layer.parameters(), moments, strict=True):
        kept = optimizer.state[parameter]["momentum_buffer"]
        assert kept.shape == parameter.grad.shape == parameter.shape
        assert torch.isin(kept, moment).all()
    layer(x[:, INPUTS]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_a_batch_norm_keeps_what_belongs_to_its_channels(options: dict[str, bool]) -> None:
    norm = nn.BatchNorm2d(4, **options).double()
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    norm(x)
    expected = norm.eval()(x)[:, OUTPUTS]
    keep_outputs(norm, OUTPUTS, [])
    assert layer_outputs(norm) == norm.num_features == 2
    assert torch.equal(norm(x[:, OUTPUTS]), expected)


def test_optimizers_whose_state_has_other_shapes_are_told() -> None:
    weight = [nn.Parameter(torch.ones(2, 2))]
    for optimizer in (
        torch.optim.SGD(weight),
        torch.optim.AdamW(weight),
        torch.optim.NAdam(weight),
    ):
        validate_channelwise_optimizer(optimizer)
        assert not optimizer.state
    with pytest.raises(ValueError, match="'row_var' of parameter 'any weight'"):
        validate_channelwise_optimizer(torch.optim.Adafactor(weight))
