"""Makes a sparse weight dense in graphs of torch.compile, without saving the dense tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.store.layout import Layout


def recomputed_densify(values: Tensor, layout: Layout) -> Tensor:
    """Return the dense tensor of kept ``values``, which the backward pass computes again.

    Differentiable in ``values``.
    """

    def densify(values: Tensor) -> Tensor:
        dense: Tensor = _densify(values, layout.positions(), layout.shape)
        return dense

    dense: Tensor = checkpoint(densify, values, use_reentrant=False)
    return dense


# One opaque operator: the compiler would save the zeros of a separate zeros and scatter.
@torch.library.custom_op("axosparse::densify", mutates_args=())
def _densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    return reference.scatter(values, indices, shape)


@_densify.register_fake
def _densify_fake(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    return values.new_empty(tuple(shape))


def _save_indices(ctx: Any, inputs: tuple[Tensor, Tensor, Sequence[int]], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return gradient.reshape(-1).index_select(0, indices), None, None


_densify.register_autograd(_backward, setup_context=_save_indices)
