"""Multiplies a matrix by a sparse weight, and computes both gradients.

Three paths compute ``inputs @ weight.t() + bias`` or ``inputs @ weight + bias``:

===========  ================================================  ==================================
path         when it runs                                      how
===========  ================================================  ==================================
layer        in the forward of ``nn.Linear`` and               one autograd node on the values;
             ``transformers``' ``Conv1D`` whose weight alone   no weight is read
             is stored sparse, if the operands are eligible
read weight  in ``F.linear``, ``mm``, ``matmul`` and           one autograd node on the weight
             ``addmm`` with a large weight that was read
             while gradients are recorded
             (``torch_functions``), if the operands are
             eligible
dense        otherwise                                         torch's own operator on a dense
                                                               copy of the weight
===========  ================================================  ==================================

Operands are eligible if they are plain tensors of fitting shapes and of one dtype, after autocast,
and no transform or compiler has to see the operators inside (``eligible``). The first path exists
because reading ``layer.weight`` and looking up the function takes a handful of Python calls,
forward and backward: longer than a small layer's product, and longer than a GPU takes.

Each of the three products of a path runs in the first of these ways that fits (``multiply``):

=============  ============================================  =====================================
way            when                                          how
=============  ============================================  =====================================
resident copy  there is one of this dtype (of "samo")         torch's product with the copy
values         on CPU in up to 32 bits, with                 compiled loops over the unpruned
               ``compute="sparse"`` or, with "auto", if the  values (``products``)
               density is so low that this is faster
               (``sparse_products``)
panels         otherwise                                     torch's product with panels of the
                                                             weight, materialized in turn
=============  ============================================  =====================================

Which way runs follows from the dtype, the device, the density, whether there is a single token,
``compute`` and the kind of processor on which the ranks of a run agree and which its checkpoints
store (``backend``): it is the same on all ranks, and in a resumed run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse.sparse.backend import Backend
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.ops import panels
from lightning_axosparse.sparse.ops import products as sparse_products
from lightning_axosparse.sparse.store.copies import DenseCopy
from lightning_axosparse.sparse.store.layout import Layout, check_unchanged
from lightning_axosparse.sparse.store.materialize import (
    DenseForm,
    autocast_dtype,
    autocast_to,
)
from lightning_axosparse.sparse.store.weight import SparseWeight, sparse_weight
from lightning_axosparse.support.torch_internals import (
    apply_untransformed,
    backward_transformed,
    batched,
    transformed,
    version_of,
)

_ROWS_ARE_OUTPUTS = {
    ("torch.nn.modules.linear", "Linear.forward"): True,
    ("transformers.pytorch_utils", "Conv1D.forward"): False,
}
"""The layer forwards of the first path, by module and name: whether rows give the outputs."""


_PLAIN = (Tensor, nn.Parameter)


class _Operands(NamedTuple):
    """Inputs and bias in the dtype that the product runs in."""

    inputs: Tensor
    bias: Tensor | None
    dtype: torch.dtype


def eligible(
    inputs: Any,
    bias: Any,
    weight: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    by_rows: bool,
    autocasts: bool = True,
) -> _Operands | None:
    """Return the operands of one product, cast as autocast casts them; None: use the dense path.

    Args:
        inputs: the factor of the weight.
        bias: the bias, or None.
        weight: the weight, or its unpruned values.
        shape: rows and columns of the weight.
        dtype: dtype of the weight.
        by_rows: whether its rows, or its columns, give the outputs.
        autocasts: whether autocast casts operands of this product.
    """
    if transformed() or torch.compiler.is_compiling():
        return None
    if type(inputs) not in _PLAIN or (bias is not None and type(bias) not in _PLAIN):
        return None
    if weight.is_meta or batched(inputs) or 0 in shape:
        return None
    features, width = shape if by_rows else reversed(shape)
    if inputs.dim() == 0 or inputs.shape[-1] != width:
        return None
    if bias is not None and bias.shape != (features,):
        return None
    autocast = autocast_dtype(inputs.device) if autocasts else None
    if autocast is not None:
        dtype = dtype if dtype == torch.float64 else autocast
        inputs = autocast_to(autocast, inputs)
        bias = None if bias is None else autocast_to(autocast, bias)
    if inputs.dtype != dtype or inputs.device != weight.device:
        return None
    if bias is not None and (bias.dtype != dtype or bias.device != weight.device):
        return None
    return _Operands(inputs, bias, dtype)


def multiply_layer(
    by_rows: bool, layer: Any, inputs: Tensor, values: Tensor, layout: Layout, form: DenseForm
) -> Tensor | None:
    """Multiply inputs by a layer's values, by the first path; None if that is not possible."""
    operands = eligible(inputs, layer.bias, values, layout.shape, form.dtype, by_rows)
    if operands is None:
        return None
    inputs, bias, _ = operands
    if not torch.is_grad_enabled():  # a node of autograd takes as long as a token's product
        return multiply(inputs, values, layout, form.copy, form.backend, by_rows, bias)
    output: Tensor = _LayerProduct.apply(inputs, values, bias, layout, form, by_rows)  # type: ignore[no-untyped-call]
    return output


def rows_are_outputs(dense_class: type[nn.Module]) -> bool | None:
    """Return whether the rows of a layer's weight, or its columns, give the outputs.

    Args:
        dense_class: the layer's class while it is dense.

    Returns:
        None if the first path does not serve such layers.
    """
    forward = dense_class.forward
    return _ROWS_ARE_OUTPUTS.get((forward.__module__, forward.__qualname__))


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Compute ``torch.nn.functional.linear`` with a read weight, as stored or transposed.

    Returns:
        The product; NotImplemented if it must run on a dense copy of the weight.
    """
    if not isinstance(weight, SparseWeight) or weight.dim() != 2:
        return NotImplemented
    by_rows = weight.has_whole_rows()
    stored: Any = weight if by_rows else weight.t()
    if not stored.has_whole_rows():
        return NotImplemented
    operands = eligible(input, bias, stored, stored.shape, stored.dtype, by_rows)
    if operands is None:
        return NotImplemented
    inputs, bias, dtype = operands
    stored = stored if stored.dtype == dtype else stored.to(dtype)
    return apply_untransformed(_WeightProduct, inputs, stored, bias, by_rows)


def mm(input: Any, mat2: Any, **options: Any) -> Any:
    """Compute ``torch.mm`` or ``torch.matmul`` as :func:`linear` does."""
    sparse = isinstance(mat2, SparseWeight) and mat2.dim() == 2 and not options
    return linear(input, mat2.t()) if sparse else NotImplemented


def addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> Any:
    """Compute ``torch.addmm`` as :func:`linear` does."""
    sparse = isinstance(mat2, SparseWeight) and mat2.dim() == 2 and not options
    return linear(mat1, mat2.t(), input) if sparse else NotImplemented


class _LayerProduct(torch.autograd.Function):
    """The product as a function of the inputs, the unpruned values and the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        values: Tensor,
        bias: Tensor | None,
        layout: Layout,
        form: DenseForm,
        by_rows: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Not saved as activations are, which may be offloaded: the parameter stays anyway.
        ctx.values, ctx.version = values, version_of(values)
        ctx.layout, ctx.form, ctx.by_rows = layout, form, by_rows
        return multiply(inputs, values, layout, form.copy, form.backend, by_rows, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        check_unchanged(ctx.values, ctx.version, ctx.layout)
        for_inputs = for_values = for_bias = None
        if ctx.needs_input_grad[0]:
            for_inputs = _input_gradient(ctx, gradient, inputs.dtype)
        if ctx.needs_input_grad[1]:
            for_values = _values_gradient(ctx, inputs, gradient)
        if ctx.needs_input_grad[2]:
            for_bias = _flat(gradient).sum(0)
        return for_inputs, for_values, for_bias, None, None, None


def _input_gradient(ctx: Any, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inputs' gradient: differentiable where gradients are recorded."""
    values, layout, form = ctx.values, ctx.layout, ctx.form
    if not backward_transformed(gradient):
        return multiply(gradient, values, layout, form.copy, form.backend, not ctx.by_rows)
    weight = sparse_weight(values, layout, DenseForm(dtype, backend=form.backend))
    weight = weight.view(layout.shape[0], -1)
    factor = weight.t() if ctx.by_rows else weight
    for_inputs = linear(gradient, factor)
    return F.linear(gradient, factor) if for_inputs is NotImplemented else cast(Tensor, for_inputs)


def _values_gradient(ctx: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the unpruned values, in the same way."""
    left, right = outer_factors(inputs, gradient, ctx.by_rows)
    if not backward_transformed(gradient):
        return sddmm(left, right, ctx.layout, ctx.form.backend, ctx.values.dtype)
    return reference.gather(left.t() @ right, ctx.layout.positions()).to(ctx.values.dtype)


class _WeightProduct(torch.autograd.Function):
    """The product as a function of the inputs, a read weight and the bias."""

    @staticmethod
    def forward(inputs: Tensor, weight: SparseWeight, bias: Tensor | None, by_rows: bool) -> Tensor:
        return _times(inputs, weight, by_rows, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        factor, weight, _, ctx.by_rows = inputs
        ctx.layout, ctx.backend = weight.sparse_layout, weight.backend
        ctx.save_for_backward(factor, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            # Hooks on saved tensors may return the weight as a plain dense tensor.
            if isinstance(weight, SparseWeight) and not backward_transformed(gradient):
                for_inputs = _times(gradient, weight, not ctx.by_rows)
            else:
                for_inputs = F.linear(gradient, weight.t() if ctx.by_rows else weight)
        if ctx.needs_input_grad[1]:
            for_weight = _weight_gradient(ctx, inputs, gradient)
        if ctx.needs_input_grad[2]:
            for_bias = _flat(gradient).sum(0)
        return for_inputs, for_weight, for_bias, None


def _times(
    inputs: Tensor, weight: SparseWeight, by_rows: bool, bias: Tensor | None = None
) -> Tensor:
    weight.check_unchanged()
    source = weight.stored_values, weight.sparse_layout, weight.dense_copy, weight.backend
    return multiply(inputs, *source, by_rows, bias)


def _weight_gradient(ctx: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return the weight's gradient: its unpruned entries, or all if it must be differentiable."""
    left, right = outer_factors(inputs, gradient, ctx.by_rows)
    if backward_transformed(gradient):
        return left.t() @ right
    values = sddmm(left, right, ctx.layout, ctx.backend, left.dtype)
    if len(ctx.layout.shape) == 2:
        return SparseWeight(values, ctx.layout)
    geometry = torch.empty(left.shape[1], right.shape[1], dtype=left.dtype, device="meta")
    return SparseWeight(values, ctx.layout, geometry)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def outer_factors(inputs: Tensor, gradient: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Return the matrices of which ``left.t() @ right`` is the weight's gradient."""
    left, right = (gradient, inputs) if by_rows else (inputs, gradient)
    return _flat(left), _flat(right)


def multiply(
    inputs: Tensor,
    values: Tensor,
    layout: Layout,
    dense_copy: DenseCopy | None,
    backend: Backend,
    by_rows: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply by the transposed weight (``by_rows``) or by the weight, in the inputs' dtype."""
    result: Tensor
    product = "spmm_t" if by_rows else "spmm"
    one_token = inputs.shape[:-1].numel() == 1
    if dense_copy is not None and dense_copy.dtype == inputs.dtype:
        dense = dense_copy.filled(values, layout).view(layout.shape[0], -1)
        result = F.linear(inputs, dense if by_rows else dense.t(), bias)
    elif sparse_products.should_run(layout, "one_token" if one_token else product, backend, inputs):
        values = values if values.dtype == inputs.dtype else values.to(inputs.dtype)
        result = getattr(sparse_products, product)(inputs, values, layout, bias)
        return result
    else:
        result = getattr(panels, product)(inputs, values, layout, bias)
    return result.detach()  # no view, so that nn.ReLU(inplace=True) may change it


def sddmm(
    left: Tensor, right: Tensor, layout: Layout, backend: Backend, dtype: torch.dtype
) -> Tensor:
    """Return the unpruned entries of ``left.t() @ right``, cast to a dtype."""
    if sparse_products.should_run(layout, "sddmm", backend, left):
        return sparse_products.sddmm(left, right, layout).to(dtype)
    return panels.sddmm(left, right, layout, dtype)
