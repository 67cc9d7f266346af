from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_axosparse import CorruptFileError
from lightning_axosparse.support.files.stored_shape import stored_shape


@pytest.mark.parametrize("sizes", [[], [0, 3], [2, 3], (5,), torch.Size([7, 1]), [1 << 58]])
def test_shapes_that_tensors_have(sizes: Any) -> None:
    assert stored_shape(sizes, "it") == torch.Size(sizes)


@pytest.mark.parametrize(
    "sizes",
    [[-1, -8], [2.0], ["2"], [True], None, "23", {}, 5, [1 << 59], [1 << 40] * 3, [0, 1 << 62]],
)
def test_what_no_tensor_has_is_refused(sizes: Any) -> None:
    with pytest.raises(CorruptFileError, match="it has the shape"):
        stored_shape(sizes, "it")
