from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.emission import Activation
from lightning_axosparse.pipeline.loss_check import check_loss, evaluating, joined
from lightning_axosparse.pipeline.microbatch import Scalar, split
from lightning_axosparse.pipeline.reductions import Weighting


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
    batch = torch.randn(8, generator=torch.Generator().manual_seed(0))
    parts = split(batch, 4)

    def again(microbatches: Any, received: Any) -> list[Any]:
        return [Scalar(loss(part.batch), Weighting()) for part in microbatches]

    def check(tolerance: float) -> None:
        check_loss(again, batch, parts, [None] * 4, nn.Identity(), tolerance)

    check(tolerance=10)
    if differs:
        with pytest.raises(MisconfigurationException, match="those of its 4 micro-batches"):
            check(tolerance=1e-3)
    else:
        check(tolerance=1e-6)
