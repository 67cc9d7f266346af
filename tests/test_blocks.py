from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_axosparse.blocks import Blocks

CPU = torch.device("cpu")


def test_a_block_comes_back_when_nothing_lives_in_it() -> None:
    blocks = Blocks()
    first = blocks.lend((3, 5), torch.float32, CPU)
    place = first.data_ptr()
    del first
    again = blocks.lend((15,), torch.float32, CPU)
    assert again.data_ptr() == place
    assert blocks.lend((15,), torch.float32, CPU).data_ptr() != place


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[2:3],
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.numpy(),
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_whoever_holds_a_view_keeps_the_block(hold: Callable[[Tensor], Any]) -> None:
    blocks = Blocks()
    tensor = blocks.lend((8,), torch.float64, CPU).fill_(7)
    place, held = tensor.data_ptr(), hold(tensor)
    del tensor
    assert blocks.lend((8,), torch.float64, CPU).fill_(0).data_ptr() != place
    assert (held == 7).all()
    del held
    assert blocks.lend((8,), torch.float64, CPU).data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [(0,), (), (2, 3)])
def test_tensors_are_as_asked_for(size: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = Blocks().lend(size, dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.device) == (size, dtype, CPU)
    assert tensor.is_contiguous()
