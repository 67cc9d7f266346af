"""Direct: the product of a linear layer with its kept values, in one step of autograd.

Reading ``layer.weight`` makes a lazy tensor that any code can use, which takes a handful of Python
calls, forward and backward: more time than a small layer's product, and than the GPU has to spare.
What the forward of a library's own linear layer does with its weight is known: such a layer is
given this forward, and it goes the general way where a product of plain tensors is not all there is
to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.layout import Layout, row_length
from lightning_axosparse.sparse.product import outer, times, times_transposed
from lightning_axosparse.sparse.reading import Reading, autocast_dtype
from lightning_axosparse.sparse.transforms import transforms, transforms_backward
from lightning_axosparse.sparse.versions import check_unchanged, version_of
from lightning_axosparse.sparse.weight import sparse_weight

_ROWS_ARE_OUTPUTS = {
    ("torch.nn.modules.linear", "Linear.forward"): True,
    ("transformers.pytorch_utils", "Conv1D.forward"): False,
}
"""The forwards that are known, by module and name; whether a weight's rows give the outputs."""


def direct_forward(
    dense_class: type[nn.Module], names: tuple[str, ...]
) -> Callable[..., Tensor] | None:
    """A forward for layers of this class whose parameters ``names`` are stored sparse, if any."""
    general: Callable[..., Tensor] = dense_class.forward
    by_rows = _ROWS_ARE_OUTPUTS.get((general.__module__, general.__qualname__))
    if by_rows is None or names != ("weight",):
        return None

    def forward(layer: Any, inputs: Tensor) -> Tensor:
        # Whoever took the bound method may have it for longer than the weight is sparse.
        layout = vars(layer).get("_layouts", {}).get("weight")
        values = layer._parameters["weight"]
        if layout is None:
            return general(layer, inputs)
        reading = layer._readings["weight"].of(values, layer.training)
        product = _product(inputs, values, layer.bias, layout, reading, by_rows)
        return general(layer, inputs) if product is None else product

    return forward


def _product(
    inputs: Tensor,
    values: Tensor,
    bias: Tensor | None,
    layout: Layout,
    reading: Reading,
    by_rows: bool,
) -> Tensor | None:
    """The layer's output, if its operands are plain tensors that fit; it follows autocast."""
    if torch.compiler.is_compiling() or values.is_meta or transforms():
        return None
    operands = (inputs, values) if bias is None else (inputs, values, bias)
    if any(type(operand) not in (Tensor, nn.Parameter) for operand in operands):
        return None
    rows, columns = layout.shape[0], row_length(layout.shape)
    width, features = (columns, rows) if by_rows else (rows, columns)
    if (
        values.shape != (layout.nnz,)
        or inputs.dim() == 0
        or inputs.shape[-1] != width
        or (bias is not None and bias.shape != (features,))
    ):
        return None
    device, dtype = inputs.device, reading.dtype
    autocast = autocast_dtype(device)
    if autocast is not None and all(map(_follows_autocast, operands)):
        dtype = autocast
        inputs = inputs.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    elif bias is not None and bias.dtype != dtype:
        return None
    if inputs.dtype != dtype or values.device != device or not layout.shape.numel():
        return None
    product: Tensor = _Linear.apply(inputs, values, bias, layout, reading, by_rows)  # type: ignore[no-untyped-call]
    return product


def _follows_autocast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


class _Linear(torch.autograd.Function):
    """inputs @ weight.t() + bias (``by_rows``), or inputs @ weight + bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        values: Tensor,
        bias: Tensor | None,
        layout: Layout,
        reading: Reading,
        by_rows: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Not saved as activations are, which may be offloaded: the parameter stays anyway.
        ctx.values, ctx.version = values, version_of(values)
        ctx.layout, ctx.reading, ctx.by_rows = layout, reading, by_rows
        flat = inputs.reshape(-1, inputs.shape[-1])
        result = _multiplied(flat, values, layout, reading, by_rows, bias)
        return result.view(*inputs.shape[:-1], result.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), values = ctx.saved_tensors, ctx.values
        check_unchanged(values, ctx.version, ctx.layout)
        if transforms_backward(gradient):
            return _differentiable_gradients(ctx, inputs, values, gradient)
        layout, reading, by_rows = ctx.layout, ctx.reading, ctx.by_rows
        for_inputs = for_values = for_bias = None
        flat = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            for_inputs = _multiplied(flat, values, layout, reading, not by_rows).view(inputs.shape)
        if ctx.needs_input_grad[1]:
            other = inputs.reshape(-1, inputs.shape[-1])
            left, right = (flat, other) if by_rows else (other, flat)
            for_values = outer(left, right, layout).to(values.dtype)
        if ctx.needs_input_grad[2]:
            for_bias = flat.sum(0)
        return for_inputs, for_values, for_bias, None, None, None


def _multiplied(
    flat: Tensor,
    values: Tensor,
    layout: Layout,
    reading: Reading,
    transposed: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """A matrix times the transposed weight, or times the weight, in the dtype of the matrix."""
    resident = reading.resident
    if resident is not None and resident.dtype == flat.dtype:
        dense = resident.whole(values, layout).view(layout.shape[0], -1)
        return F.linear(flat, dense if transposed else dense.t(), bias)
    multiply = times_transposed if transposed else times
    return multiply(flat, values.to(flat.dtype), layout, bias)


def _differentiable_gradients(
    ctx: Any, inputs: Tensor, values: Tensor, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients as functions of all that they depend on, for double backward."""
    weight = sparse_weight(values, ctx.layout, Reading(inputs.dtype)).view(ctx.layout.shape[0], -1)
    flat, other = (side.reshape(-1, side.shape[-1]) for side in (gradient, inputs))
    for_inputs = F.linear(gradient, weight.t() if ctx.by_rows else weight)
    dense = flat.t() @ other if ctx.by_rows else other.t() @ flat
    for_values = reference.gather(dense, ctx.layout.positions()).to(values.dtype)
    for_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
    return for_inputs, for_values, for_bias, None, None, None
