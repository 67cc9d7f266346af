from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.loss_check import check_loss, evaluating, joined
from lightning_axosparse.pipeline.side_outputs import Activation
from tests.pipeline.test_engine import pipeline, training


def test_what_was_received_is_joined_along_its_samples() -> None:
    sizes = (2, 3)
    trees = [
        Activation({"x": torch.ones(size, 4), "time first": torch.ones(7, size), "mask": mask})
        for size, mask in zip(sizes, (torch.ones(1, 9), torch.zeros(1, 9)), strict=True)
    ]
    whole = joined(trees, sizes)
    assert isinstance(whole, Activation)
    assert whole.output["x"].shape == (5, 4)
    assert whole.output["time first"].shape == (7, 5)
    assert torch.equal(whole.output["mask"], torch.ones(1, 9))
    assert joined([None, None], sizes) is None


def test_modes_are_as_they_were() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval()))
    with evaluating(module):
        assert not any(submodule.training for submodule in module.modules())
    assert [submodule.training for submodule in module.modules()] == [True, True, True, False]


@pytest.mark.parametrize(("loss", "differs"), [(Tensor.mean, False), (Tensor.std, True)])
def test_a_difference_is_refused(loss: Any, differs: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Dropout())
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    pipe, _ = pipeline(model, 2)
    trained = replace(training(lambda x: loss(model(x)), batch, 4), received=[])
    pipe.train(trained)

    check_loss(pipe, trained, batch, model, tolerance=10)
    if differs:
        with pytest.raises(MisconfigurationException, match="those of its 4 micro-batches"):
            check_loss(pipe, trained, batch, model, tolerance=1e-3)
    else:
        check_loss(pipe, trained, batch, model, tolerance=1e-5)
