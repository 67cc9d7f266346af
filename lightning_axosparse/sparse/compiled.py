"""Compiled: the dense weight for torch.compile, as one operator that backward runs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.sparse import kernels


def recomputed_densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Make ``values`` dense in a graph that torch.compile traces, without saving the dense tensor.

    Arguments as for :func:`lightning_axosparse.sparse.kernels.densify`; differentiable in
    ``values``.
    """
    dense: Tensor = checkpoint(_densify, values, indices, shape, use_reentrant=False)
    return dense


# One opaque operator: of a zeros and a scatter, the compiler would save the zeros.
@torch.library.custom_op("axosparse::densify", mutates_args=())
def _densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    return kernels.densify(values, indices, shape)


@_densify.register_fake
def _like_densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    return values.new_empty(tuple(shape))


def _save_indices(ctx: Any, inputs: tuple[Tensor, Tensor, Sequence[int]], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return gradient.reshape(-1).index_select(0, indices), None, None


_densify.register_autograd(_backward, setup_context=_save_indices)
