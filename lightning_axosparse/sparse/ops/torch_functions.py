"""Computes some torch functions of a sparse weight without its whole dense form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse.sparse.ops.embedding import embedding
from lightning_axosparse.sparse.ops.experts import (
    bmm,
    getitem,
    grouped_mm,
    matmul,
    selecting,
    transposing,
)
from lightning_axosparse.sparse.ops.linear import addmm, linear, mm
from lightning_axosparse.sparse.store.layout import Layout, is_stack
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.sparse.store.weight import SparseWeight, sparse_weight
from lightning_axosparse.support import torch_internals
from lightning_axosparse.support.torch_internals import plain_torch_functions, transformed

MIN_ENTRIES = 2**18
"""Smaller matrices are materialized whole: the Python calls would take longer than they save."""

_SELECTING = (
    *(torch.select, torch.unbind, torch.split, torch.chunk, torch.narrow, torch.tensor_split),
    *(Tensor.select, Tensor.unbind, Tensor.split, Tensor.chunk, Tensor.narrow),
    *(Tensor.tensor_split,),
)

_TRANSPOSING = cast(Any, Tensor.mT).__get__, Tensor.transpose, torch.transpose

REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: linear,
    F.embedding: embedding,
    torch.mm: mm,
    torch.matmul: matmul,
    torch.addmm: addmm,
    Tensor.mm: mm,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    Tensor.addmm: addmm,
    torch.bmm: bmm,
    Tensor.bmm: bmm,
    torch_internals.grouped_mm: grouped_mm,
    Tensor.__getitem__: getitem,
    **{function: selecting(function) for function in _SELECTING},
    **{function: transposing(function) for function in _TRANSPOSING},
}
"""The replacement of a torch function, with the same arguments and argument names.

It returns NotImplemented if the torch function itself must run.
"""


def read_weight(values: Tensor, layout: Layout, form: DenseForm) -> Tensor:
    """Read a sparsely stored parameter as a weight of the dense shape.

    Args:
        values: unpruned values, shape ``(layout.nnz,)``, floating.
        layout: the positions of the values.
        form: the weight's dtype and resident copy.
    """
    large = layout.shape.numel() >= MIN_ENTRIES and torch.is_grad_enabled()
    # The fast path of ``nn.TransformerEncoderLayer`` would multiply without autocast's casts.
    cast_to_16_bits = torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    overrides = (large or is_stack(layout.shape) or cast_to_16_bits) and not transformed()
    return sparse_weight(values, layout, form, OverridingWeight if overrides else SparseWeight)


class OverridingWeight(SparseWeight):
    """A sparse weight for which ``REPLACEMENTS`` run.

    Weights are of this class only where that pays: large ones, and stacks of matrices. Without
    gradients, matrices of ``nn.TransformerEncoderLayer`` would disable its fast path, which only
    autocast requires.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the replacement of a torch function if there is one and it applies."""
        with plain_torch_functions():
            replacement = None if transformed() else REPLACEMENTS.get(func)
            result = replacement(*args, **(kwargs or {})) if replacement else NotImplemented
            return func(*args, **(kwargs or {})) if result is NotImplemented else result
