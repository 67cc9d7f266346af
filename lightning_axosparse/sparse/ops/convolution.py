"""Convolves with the unpruned values of a weight on a CPU, and computes both gradients.

The forward of ``nn.Conv1d`` and ``nn.Conv2d`` runs on the unpruned values if they are float32 on a
CPU, if the density is low enough or ``compute="sparse"``, if the padding is of zeros and the
geometry fits. Otherwise torch convolves with a dense copy of the weight.

The loops are in ``kernels/convolutions.py``. ``benchmarks/overhead/convolutions.py`` measures them
against torch's convolution with a dense weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import grad as dense_gradients

from lightning_axosparse.sparse.backend import Backend
from lightning_axosparse.sparse.kernels import kernel_module, reference
from lightning_axosparse.sparse.ops.products import can_read, kernel_weight
from lightning_axosparse.sparse.store.formats import SegmentLayout, layout_of
from lightning_axosparse.sparse.store.layout import INT32_ENTRIES, Layout, check_unchanged
from lightning_axosparse.sparse.store.materialize import DenseForm, autocast_dtype
from lightning_axosparse.sparse.store.scratch import Use, scratch
from lightning_axosparse.sparse.store.weight import sparse_weight
from lightning_axosparse.support.threads import run_in_threads
from lightning_axosparse.support.torch_internals import (
    backward_transformed,
    batched,
    transformed,
    version_of,
)

MAX_DENSITY = 0.25
"""The largest density at which forward and backward take less time here."""

FEWEST_POSITIONS = 64
"""Images of fewer outputs, all together, are convolved with a dense weight."""

_CHUNK = 2**20
"""Padded numbers of the images that are convolved together, if that is several images."""

_LINE = 16
"""Numbers of a line of the cache."""

_NO_BIAS: Any = np.empty(0, np.float32)

Pair = tuple[int, int]

_FORWARDS = {
    nn.Conv1d.forward: nn.Conv1d._conv_forward,
    nn.Conv2d.forward: nn.Conv2d._conv_forward,
}


def can_convolve(dense_class: type[nn.Module]) -> bool:
    """Return whether layers that are of this class while they are dense may run here."""
    convolution = _FORWARDS.get(cast(Any, dense_class.forward))
    return convolution is not None and getattr(dense_class, "_conv_forward", None) is convolution


def convolve_layer(
    layer: Any, inputs: Tensor, values: Tensor, layout: Layout, form: DenseForm
) -> Tensor | None:
    """Convolve inputs with a layer's unpruned values; None if that is not possible."""
    if form.copy is not None or not _eligible(layer, inputs, values, form):
        return None
    if not should_run(layout, form.backend, values):
        return None
    sizes = tuple(layout.shape), tuple(inputs.shape)
    geometry = _geometry(*sizes, layer.stride, layer.padding, layer.dilation, layer.groups)
    if not geometry.fits or not large_enough(form.backend, geometry):
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
    """The outputs as a function of the inputs, the unpruned values and the bias."""

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
        outputs = forward(images, values, layout, geometry, bias)
        return _like(inputs, outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), values = ctx.saved_tensors, ctx.values
        layout, geometry = ctx.layout, ctx.geometry
        check_unchanged(values, ctx.version, layout)
        images, outer = inputs.reshape(geometry.images), gradient.reshape(geometry.outputs)
        for_inputs = for_values = None
        if backward_transformed(gradient):
            for_inputs, for_values = _differentiable_gradients(ctx, images, values, outer)
        else:
            if ctx.needs_input_grad[0]:
                for_inputs = transposed(outer, values, layout, geometry)
            if ctx.needs_input_grad[1]:
                for_values = sddmm(outer, images, layout, geometry)
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


def should_run(layout: Layout, backend: Backend, operand: Tensor) -> TypeGuard[SegmentLayout]:
    """Return whether convolutions with a sparse weight should run here, if their geometry fits.

    Args:
        layout: the layout of the weight.
        backend: how products with the weight run.
        operand: the values, or another operand, of the dtype in which the product runs.
    """
    if operand.dtype != torch.float32 or not can_read(layout, operand):
        return False
    if backend.compute in ("dense", "sparse"):
        return backend.compute == "sparse"
    gains = backend.processor not in ("dense", "few")
    return gains and layout.nnz <= MAX_DENSITY * layout.shape.numel()


def large_enough(backend: Backend, geometry: Geometry) -> bool:
    """Return whether a convolution has enough outputs to be faster here."""
    images, _, height, width = geometry.outputs
    return backend.compute == "sparse" or images * height * width >= FEWEST_POSITIONS


@dataclass(frozen=True)
class Geometry:
    """One convolution in two dimensions: a weight's, and the inputs' sizes.

    Attributes:
        weight: shape of the weight.
        images: shape of the inputs, ``(images, channels, height, width)``.
        stride: of the filter, down and across.
        padding: zeros before and after the inputs, down and across.
        dilation: of the filter, down and across.
        groups: groups of channels that see each other alone.
    """

    weight: tuple[int, ...]
    images: tuple[int, ...]
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def outputs(self) -> tuple[int, int, int, int]:
        """Shape of the outputs."""
        height, width = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, pad, dilation, kernel, stride in zip(
                self.images[2:],
                self.padding,
                self.dilation,
                self.weight[2:],
                self.stride,
                strict=True,
            )
        )
        return self.images[0], self.weight[0], height, width

    @property
    def fits(self) -> bool:
        """Whether the loops can run it."""
        reach = (d * (kernel - 1) for d, kernel in zip(self.dilation, self.weight[2:], strict=True))
        return (
            self.images[1] == self.weight[1] * self.groups
            and self.weight[0] % self.groups == 0
            and min(self.outputs) > 0
            and all(pad <= limit for pad, limit in zip(self.padding, reach, strict=True))
            and max(self.planes.number, self.weight[0]) * self.planes.stride < INT32_ENTRIES
        )

    @cached_property
    def planes(self) -> _Planes:
        """How the images lie in memory."""
        return _Planes(self)


@cache
def load_loops() -> None:
    """Compile the loops, or load them from numba's cache, before a convolution needs them."""
    layout = layout_of(torch.ones(1, 64, 1, 1, dtype=torch.bool, device="cpu"), "segments")
    assert isinstance(layout, SegmentLayout)
    images = torch.zeros(1, 64, 2, 8, dtype=torch.float32, device="cpu")
    geometry = Geometry((1, 64, 1, 1), tuple(images.shape), (1, 1), (0, 0), (1, 1), 1)
    values = sddmm(images[:, :1], images, layout, geometry)
    transposed(forward(images, values, layout, geometry), values, layout, geometry)


def forward(
    images: Tensor,
    values: Tensor,
    layout: SegmentLayout,
    geometry: Geometry,
    bias: Tensor | None = None,
) -> Tensor:
    """Convolve images with the weight.

    Args:
        images: shape ``geometry.images``, float32, on CPU.
        values: unpruned values of the weight, of shape ``geometry.weight``.
        layout: the positions of the values.
        geometry: the convolution.
        bias: a number for each output channel.

    Returns:
        A tensor of shape ``geometry.outputs``.
    """
    planes, result = geometry.planes, images.new_empty(geometry.outputs)
    taps, shift = _taps(values, layout, geometry), _NO_BIAS if bias is None else _flat(bias)
    for chunk in planes.chunks:
        memory, source = planes.memory_of_outputs(), planes.of_inputs(images[chunk])
        _convolve(planes, source, taps, geometry.weight[0], shift, _flat(memory)[planes.margin :])
        planes.to_outputs(memory, result[chunk])
    return result


def transposed(
    gradient: Tensor, values: Tensor, layout: SegmentLayout, geometry: Geometry
) -> Tensor:
    """Return the gradient of the images from that of the outputs; arguments as for the others."""
    planes, result = geometry.planes, gradient.new_empty(geometry.images)
    taps = _transposed_taps(values, layout, geometry)
    for chunk in planes.chunks:
        memory, source = planes.memory_of_inputs(), planes.of_outputs(gradient[chunk])
        _convolve(planes, source, taps, planes.number, _NO_BIAS, _flat(memory))
        planes.to_inputs(memory, result[chunk])
    return result


def _convolve(planes: _Planes, source: Any, taps: Any, rows: int, bias: Any, target: Any) -> None:
    """Compute the planes of the target, one for each row, in threads."""

    def part(first: int, last: int) -> None:
        sizes = planes.stride, planes.positions
        loops = kernel_module("convolutions")
        loops.convolve(source, taps, (first, last), bias, target, *sizes)

    run_in_threads(part, rows, 1, planes.positions * len(taps.values))


def sddmm(gradient: Tensor, images: Tensor, layout: SegmentLayout, geometry: Geometry) -> Tensor:
    """Return the unpruned entries of the gradient of the weight; arguments as for the others."""
    planes = geometry.planes
    result = images.new_zeros(layout.nnz)
    taps = _taps(result, layout, geometry)
    for chunk in planes.chunks:
        source = planes.of_inputs(images[chunk])
        factors = planes.of_outputs(gradient[chunk]), planes.stride, planes.margin

        def part(first: int, last: int, source: Any = source, factors: Any = factors) -> None:
            rows = first, last
            kernel_module("convolutions").correlate(source, taps, rows, factors, planes.positions)

        run_in_threads(part, geometry.weight[0], 1, planes.positions * layout.nnz)
    return result


class _Planes:
    """The inputs and outputs of a convolution as planes in memory, flat and padded.

    A plane has one channel of some images, row after row. Zeros between rows, and between images,
    are the padding after the one and before the other. With a stride of s, a channel of the inputs
    has a plane for every s-th row and column. A plane of the outputs begins with a margin of zeros
    and has the rows and columns of the inputs' planes, so a shift leads from one to the other.

    Attributes:
        chunks: the images that are convolved together.
        number: planes of the inputs.
        positions: numbers of a plane that are sums.
        margin: the largest shift.
        stride: numbers from one plane to the next.
    """

    def __init__(self, geometry: Geometry) -> None:
        images, channels, *size = geometry.images
        (down, across), (above, before) = geometry.stride, geometry.padding
        self._geometry = geometry
        self._grid = rows, columns = -(-(size[0] + above) // down), -(-(size[1] + before) // across)
        places = [
            (y * geometry.dilation[0], x * geometry.dilation[1])
            for y in range(geometry.weight[2])
            for x in range(geometry.weight[3])
        ]
        self._phases = sorted({(y % down, x % across) for y, x in places})
        self._in_phase = [self._phases.index((y % down, x % across)) for y, x in places]
        self._shifts = [y // down * columns + x // across for y, x in places]
        self.number, self.margin = channels * len(self._phases), max(self._shifts)
        limit = _CHUNK // (max(self.number, geometry.weight[0]) * rows * columns)
        chunks = -(-images // max(limit, 1))
        together = -(-images // max(chunks, 1))
        self.chunks = [slice(first, first + together) for first in range(0, images, together or 1)]
        self.positions = -(-together * rows * columns // _LINE) * _LINE
        self.stride = _spread(self.positions + self.margin)

    def of_inputs(self, images: Tensor) -> Any:
        """Return images as planes."""
        memory = self.memory_of_inputs().zero_()
        for plane, rows, columns in self._views(memory, len(images)):
            plane.copy_(images[:, :, rows, columns].transpose(0, 1))
        return _flat(memory)

    def memory_of_inputs(self) -> Tensor:
        """Return the memory for planes of the inputs."""
        return self._memory("packed", self.number)

    def to_inputs(self, memory: Tensor, images: Tensor) -> None:
        """Copy planes that were written to ``memory`` to ``images``."""
        if len(self._phases) < prod(self._geometry.stride):
            images.zero_()  # rows or columns that no output sees
        for plane, rows, columns in self._views(memory, len(images)):
            images[:, :, rows, columns].copy_(plane.transpose(0, 1))

    def of_outputs(self, outputs: Tensor) -> Any:
        """Return outputs, or their gradient, as planes with zeros around them."""
        memory = self.memory_of_outputs().zero_()
        self._outputs_view(memory, outputs).copy_(outputs.transpose(0, 1))
        return _flat(memory)

    def memory_of_outputs(self) -> Tensor:
        """Return the memory for planes of the outputs."""
        return self._memory("tile", self._geometry.weight[0])

    def to_outputs(self, memory: Tensor, outputs: Tensor) -> None:
        """Copy planes that were written to ``memory`` to ``outputs``."""
        outputs.copy_(self._outputs_view(memory, outputs).transpose(0, 1))

    @cached_property
    def columns(self) -> tuple[Any, Any]:
        """The input plane of each column of the weight, and the shift in it."""
        channels, phases = self._geometry.weight[1], len(self._phases)
        plane = np.arange(channels)[:, None] * phases + np.array(self._in_phase)
        shift = np.tile(np.array(self._shifts), channels)
        return plane.reshape(-1).astype(np.int32), shift.astype(np.int32)

    @property
    def of_group(self) -> int:
        """Input planes that a group of channels sees."""
        return self._geometry.weight[1] * len(self._phases)

    def _memory(self, use: Use, planes: int) -> Tensor:
        return scratch.take(use, planes * self.stride, torch.float32, torch.device("cpu"))

    def _views(self, memory: Tensor, images: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield the inside of the input planes, and the rows and columns of images in it.

        A plane is a tensor of channels x images x rows x columns.
        """
        geometry, (height, width) = self._geometry, self._grid
        shape = geometry.images[1], len(self._phases), self.stride
        planes = memory.view(shape)[..., : images * height * width]
        for plane, (y, x) in zip(planes.unbind(1), self._phases, strict=True):
            rows = _every(y, 0, geometry)
            columns = _every(x, 1, geometry)
            inside = plane.unflatten(-1, (images, height, width))
            yield inside[:, :, rows[0], columns[0]], rows[1], columns[1]

    def _outputs_view(self, memory: Tensor, outputs: Tensor) -> Tensor:
        images, channels, height, width = outputs.shape
        planes = memory.view(channels, self.stride)[:, self.margin :]
        grid = planes[:, : images * prod(self._grid)].unflatten(-1, (images, *self._grid))
        inside: Tensor = grid[:, :, :height, :width]
        return inside


def _every(phase: int, dimension: int, geometry: Geometry) -> tuple[slice, slice]:
    """Return the rows (or columns) of a phase in a plane, and the same rows of an image."""
    stride, padding = geometry.stride[dimension], geometry.padding[dimension]
    size = geometry.images[2 + dimension]
    first = (phase - padding) % stride
    begin = (first + padding) // stride
    return slice(begin, begin + len(range(first, size, stride))), slice(first, None, stride)


def _spread(numbers: int) -> int:
    """Round up to an odd number of cache lines.

    Planes that are a power of two apart would share the same few lines of the cache.
    """
    return (-(-numbers // _LINE) | 1) * _LINE


def _taps(values: Tensor, layout: SegmentLayout, geometry: Geometry) -> Any:
    """Return the unpruned entries by output channel, with their places in the inputs."""
    planes, rows = geometry.planes, geometry.weight[0]
    plane, shift = planes.columns
    places = scratch.take("positions", layout.nnz, torch.int32, torch.device("cpu")).numpy()
    begins = np.empty(rows + 1, np.int64)
    group = rows // geometry.groups, planes.of_group * planes.stride
    columns, weight = plane * np.int32(planes.stride) + shift, kernel_weight(layout, values)
    kernel_module("convolutions").places(weight, columns, group, places, begins)
    return kernel_module("convolutions").Taps(places, weight.values, begins)


def _transposed_taps(values: Tensor, layout: SegmentLayout, geometry: Geometry) -> Any:
    """Return the unpruned entries by input plane, with their places in the outputs."""
    planes = geometry.planes
    memory = scratch.take("positions", 2 * layout.nnz, torch.int32, torch.device("cpu"))
    places, entries = memory[: layout.nnz].numpy(), memory[layout.nnz :].view(torch.float32).numpy()
    begins = np.empty(planes.number + 1, np.int64)
    taps = kernel_module("convolutions").Taps(places, entries, begins)
    group = geometry.weight[0] // geometry.groups, planes.of_group
    rows, weight = (planes.stride, planes.margin), kernel_weight(layout, values)
    kernel_module("convolutions").transposed_places(weight, planes.columns, group, rows, taps)
    return taps


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).numpy()
