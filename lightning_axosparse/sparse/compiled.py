"""Compiled: the dense weight for torch.compile, as one operator that backward runs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.layout import Layout


def recomputed_densify(values: Tensor, layout: Layout) -> Tensor:
    """Make ``values`` dense in a graph that torch.compile traces, without saving the dense tensor.

    Differentiable in ``values``.
    """

    def densify(values: Tensor) -> Tensor:
        made: Tensor = _densify(values, layout.positions(), layout.shape)
        return made

    dense: Tensor = checkpoint(densify, values, use_reentrant=False)
    return dense


# One opaque operator: of a zeros and a scatter, the compiler would save the zeros.
@torch.library.custom_op("axosparse::densify", mutates_args=())
def _densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    return reference.scatter(values, indices, shape)


@_densify.register_fake
def _like_densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    return values.new_empty(tuple(shape))


def _save_indices(ctx: Any, inputs: tuple[Tensor, Tensor, Sequence[int]], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return gradient.reshape(-1).index_select(0, indices), None, None


_densify.register_autograd(_backward, setup_context=_save_indices)
