"""Convolves with a sparse weight without making it dense, and computes both gradients.

The forward of ``nn.Conv1d`` and ``nn.Conv2d`` runs on the kept values (``kept_convolutions``) if
they are float32 on a CPU, few enough, or ``compute="sparse"``, if the padding is of zeros and
the geometry fits. Otherwise torch convolves with a dense copy of the weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import grad as dense_gradients

from lightning_axosparse.sparse.cpu import convolutions as kept_convolutions
from lightning_axosparse.sparse.cpu.convolutions import Geometry
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.store.formats import SegmentLayout
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm, autocast_dtype
from lightning_axosparse.sparse.store.weight import check_unchanged, sparse_weight
from lightning_axosparse.support.torch_internals import (
    backward_transformed,
    batched,
    transformed,
    version_of,
)

_FORWARDS = {
    nn.Conv1d.forward: nn.Conv1d._conv_forward,
    nn.Conv2d.forward: nn.Conv2d._conv_forward,
}


def convolves(dense_class: type[nn.Module]) -> bool:
    """Return whether layers that are of this class while they are dense may run here."""
    convolution = _FORWARDS.get(cast(Any, dense_class.forward))
    own = getattr(dense_class, "_conv_forward", None)
    return convolution is not None and own is convolution


def convolved(
    layer: Any, inputs: Tensor, values: Tensor, layout: Layout, form: DenseForm
) -> Tensor | None:
    """Convolve inputs with a layer's kept values; None if a dense weight has to be used."""
    if form.copy is not None or not _eligible(layer, inputs, values, form):
        return None
    if not kept_convolutions.chosen(layout, form.backend, values):
        return None
    geometry = _geometry_of(layer, layout.shape, inputs)
    if not geometry.fits or not kept_convolutions.large_enough(form.backend, geometry):
        return None
    result: Tensor = _Convolution.apply(inputs, values, layer.bias, layout, geometry)  # type: ignore[no-untyped-call]
    return result


def _eligible(layer: Any, inputs: Any, values: Tensor, form: DenseForm) -> bool:
    """Return whether the operands are plain float32 tensors on CPU that no transform has to see."""
    if transformed() or torch.compiler.is_compiling():
        return False
    operands = inputs, values, *(() if layer.bias is None else (layer.bias,))
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in operands):
        return False
    plain = all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in operands)
    return (
        plain
        and form.dtype == torch.float32
        and autocast_dtype(inputs.device) in (None, torch.float32)
        and not batched(inputs)
        and inputs.dim() == 2 + len(layer.kernel_size)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _geometry_of(layer: Any, shape: torch.Size, inputs: Tensor) -> Geometry:
    sizes = tuple(shape), tuple(inputs.shape)
    return _geometry(*sizes, layer.stride, layer.padding, layer.dilation, layer.groups)


@lru_cache(maxsize=1024)
def _geometry(
    weight: tuple[int, ...],
    inputs: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Geometry:
    """Return the geometry, with one row if it has one dimension."""
    if len(stride) == 1:
        weight, inputs = ((*shape[:2], 1, *shape[2:]) for shape in (weight, inputs))
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    return Geometry(weight, inputs, stride, padding, dilation, groups)  # type: ignore[arg-type]


class _Convolution(torch.autograd.Function):
    """The outputs as a function of the inputs, the kept values and the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        values: Tensor,
        bias: Tensor | None,
        layout: SegmentLayout,
        geometry: Geometry,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Not saved as activations are, which may be offloaded: the parameter stays anyway.
        ctx.values, ctx.version = values, version_of(values)
        ctx.layout, ctx.geometry = layout, geometry
        images = inputs.view(geometry.images) if inputs.dim() == 3 else inputs
        outputs = kept_convolutions.forward(images, values, layout, geometry, bias)
        return _like(inputs, outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), values, layout, geometry = (
            ctx.saved_tensors,
            ctx.values,
            ctx.layout,
            ctx.geometry,
        )
        check_unchanged(values, ctx.version, layout)
        images, outer = inputs.reshape(geometry.images), gradient.reshape(geometry.outputs)
        for_inputs = for_values = None
        if backward_transformed(gradient):
            for_inputs, for_values = _differentiable_gradients(ctx, images, values, outer)
        else:
            if ctx.needs_input_grad[0]:
                for_inputs = kept_convolutions.transposed(outer, values, layout, geometry)
            if ctx.needs_input_grad[1]:
                for_values = kept_convolutions.sddmm(outer, images, layout, geometry)
        for_bias = outer.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        for_inputs = None if for_inputs is None else _like(inputs, for_inputs)
        return for_inputs, for_values, for_bias, None, None


def _like(inputs: Tensor, images: Tensor) -> Tensor:
    """Return images with the dimensions and in the memory format of ``inputs``."""
    if inputs.dim() == 3:
        return images.squeeze(2)
    last = inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()
    return images.contiguous(memory_format=torch.channels_last) if last else images


def _differentiable_gradients(
    ctx: Any, images: Tensor, values: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients as differentiable functions of their operands, for double backward."""
    geometry, layout = ctx.geometry, ctx.layout
    options = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    weight = sparse_weight(values, layout, DenseForm(values.dtype)).view(geometry.weight)
    for_inputs = dense_gradients.conv2d_input(images.shape, weight, gradient, *options)
    dense = dense_gradients.conv2d_weight(images, geometry.weight, gradient, *options)
    return for_inputs, reference.gather(dense, layout.positions())
