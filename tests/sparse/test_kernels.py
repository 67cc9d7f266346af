from __future__ import annotations

import torch

from lightning_axosparse.sparse import kernels
from lightning_axosparse.timing import clock


def test_kernels_account_for_their_time():
    clock.reset()
    indices = torch.tensor([0, 3], dtype=torch.int32)
    dense = kernels.densify(torch.tensor([1.0, 2.0]), indices, (2, 2))
    assert dense.tolist() == [[1, 0], [0, 2]]
    assert clock.totals["densify"] > 0
    assert clock.totals["compress"] == 0
    assert kernels.compress(dense, indices).tolist() == [1, 2]
    assert clock.totals["compress"] > 0


def test_the_reference_is_differentiable():
    indices = torch.tensor([1, 2], dtype=torch.int32)
    values = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda v: kernels.compress(kernels.densify(v, indices, (2, 2)).square(), indices), values
    )
