"""Convolves with the kept values of a sparse weight on a CPU, without a dense one.

The loops are in ``kernels/convolutions.py``. ``benchmarks/overhead/convolutions.py`` measures them
against torch's convolution with a dense weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.backend import Backend
from lightning_axosparse.sparse.cpu.products import in_threads, readable, weight_of
from lightning_axosparse.sparse.kernels import kernel_module
from lightning_axosparse.sparse.store.formats import SegmentLayout, layout_of
from lightning_axosparse.sparse.store.layout import INT32_ENTRIES, Layout
from lightning_axosparse.sparse.store.scratch import Use, scratch

MOST_KEPT = 0.25
"""The largest share of kept entries with which forward and backward take less time here."""

FEWEST_POSITIONS = 64
"""Images of fewer outputs, all together, are convolved with a dense weight."""

_CHUNK = 2**20
"""Padded numbers of the images that are convolved together, if that is several images."""

_LINE = 16
"""Numbers of a line of the cache."""

Pair = tuple[int, int]


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
            and all(pad <= most for pad, most in zip(self.padding, reach, strict=True))
            and max(self.planes.inputs, self.planes.outputs) < INT32_ENTRIES
        )

    @cached_property
    def planes(self) -> _Planes:
        """How the images lie in memory."""
        return _Planes(self)


def chosen(layout: Layout, backend: Backend, operand: Tensor) -> TypeGuard[SegmentLayout]:
    """Return whether convolutions with a sparse weight are to run here, if their geometry fits.

    Args:
        layout: the kept entries.
        backend: how products with the weight run.
        operand: the kept values or another operand, of the dtype in which the product runs.
    """
    if operand.dtype != torch.float32 or not readable(layout, operand):
        return False
    if backend.compute != "auto":
        return backend.compute == "sparse"
    return backend.processor != "unmeasured" and layout.nnz <= MOST_KEPT * layout.shape.numel()


def large_enough(backend: Backend, geometry: Geometry) -> bool:
    """Return whether a convolution has enough outputs to be faster here."""
    images, _, height, width = geometry.outputs
    return backend.compute == "sparse" or images * height * width >= FEWEST_POSITIONS


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
        values: kept values of the weight, of shape ``geometry.weight``.
        layout: the kept entries.
        geometry: the convolution.
        bias: a number for each output channel.

    Returns:
        A tensor of shape ``geometry.outputs``.
    """
    planes = geometry.planes
    result = images.new_empty(geometry.outputs)
    taps, shift = (
        _taps(values, layout, geometry),
        _flat(images.new_empty(0) if bias is None else bias),
    )
    for chunk in planes.chunks:
        memory = planes.memory_of_outputs()
        source = planes.of_inputs(images[chunk])
        target = _flat(memory)[planes.margin :], planes.stride, planes.positions

        def part(first: int, last: int, source: Any = source, target: Any = target) -> None:
            kernel_module("convolutions").convolve(source, taps, (first, last), shift, *target)

        in_threads(part, geometry.weight[0], 1, planes.positions * layout.nnz)
        planes.to_outputs(memory, result[chunk])
    return result


def transposed(
    gradient: Tensor, values: Tensor, layout: SegmentLayout, geometry: Geometry
) -> Tensor:
    """Return the gradient of the images from that of the outputs; arguments as for the others."""
    planes = geometry.planes
    result = gradient.new_empty(geometry.images)
    taps, shift = _transposed_taps(values, layout, geometry), _flat(gradient.new_empty(0))
    for chunk in planes.chunks:
        memory = planes.memory_of_inputs()
        source = planes.of_outputs(gradient[chunk])
        target = _flat(memory), planes.stride, planes.positions

        def part(first: int, last: int, source: Any = source, target: Any = target) -> None:
            kernel_module("convolutions").convolve(source, taps, (first, last), shift, *target)

        in_threads(part, planes.number, 1, planes.positions * layout.nnz)
        planes.to_inputs(memory, result[chunk])
    return result


def sddmm(gradient: Tensor, images: Tensor, layout: SegmentLayout, geometry: Geometry) -> Tensor:
    """Return the kept entries of the gradient of the weight; arguments as for the others."""
    planes = geometry.planes
    result = images.new_zeros(layout.nnz)
    taps = _taps(result, layout, geometry)
    for chunk in planes.chunks:
        source = planes.of_inputs(images[chunk])
        factors = planes.of_outputs(gradient[chunk]), planes.stride, planes.margin

        def part(first: int, last: int, source: Any = source, factors: Any = factors) -> None:
            rows = first, last
            kernel_module("convolutions").correlate(source, taps, rows, factors, planes.positions)

        in_threads(part, geometry.weight[0], 1, planes.positions * layout.nnz)
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
        most = _CHUNK // (max(self.number, geometry.weight[0]) * rows * columns)
        chunks = -(-images // max(most, 1))
        together = -(-images // max(chunks, 1))
        self.chunks = [slice(first, first + together) for first in range(0, images, together or 1)]
        self.positions = -(-together * rows * columns // _LINE) * _LINE
        self.stride = _spread(self.positions + self.margin)

    @property
    def inputs(self) -> int:
        """Numbers of all planes of the inputs."""
        return self.number * self.stride

    @property
    def outputs(self) -> int:
        """Numbers of all planes of the outputs."""
        return self._geometry.weight[0] * self.stride

    def of_inputs(self, images: Tensor) -> Any:
        """Return images as planes."""
        memory = self.memory_of_inputs().zero_()
        for plane, rows, columns in self._views(memory, len(images)):
            plane.copy_(images[:, :, rows, columns].transpose(0, 1))
        return _flat(memory)

    def memory_of_inputs(self) -> Tensor:
        """Return where to write planes of the inputs."""
        return _memory("packed", self.inputs)

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
        """Return where to write planes of the outputs."""
        return _memory("tile", self.outputs)

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

    def _views(self, memory: Tensor, images: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """The inside of the input planes, and the rows and columns of images that lie there.

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
    """Return where the rows (or columns) of a phase lie in a plane, and which of an image's."""
    stride, padding = geometry.stride[dimension], geometry.padding[dimension]
    size = geometry.images[2 + dimension]
    first = (phase - padding) % stride
    begin = (first + padding) // stride
    return slice(begin, begin + len(range(first, size, stride))), slice(first, None, stride)


def _spread(numbers: int) -> int:
    """Return the least odd number of lines for so many numbers.

    Planes that are a power of two apart would share the same few lines of the cache.
    """
    return (-(-numbers // _LINE) | 1) * _LINE


def _taps(values: Tensor, layout: SegmentLayout, geometry: Geometry) -> Any:
    """Return the kept entries by output channel, with their places in the inputs."""
    planes, rows = geometry.planes, geometry.weight[0]
    plane, shift = planes.columns
    places = scratch.take("positions", layout.nnz, torch.int32, torch.device("cpu")).numpy()
    begins = np.empty(rows + 1, np.int64)
    group = rows // geometry.groups, planes.of_group * planes.stride
    columns, weight = plane * np.int32(planes.stride) + shift, weight_of(layout, values)
    kernel_module("convolutions").places(weight, columns, group, places, begins)
    return kernel_module("convolutions").Taps(places, weight.values, begins)


def _transposed_taps(values: Tensor, layout: SegmentLayout, geometry: Geometry) -> Any:
    """Return the kept entries by input plane, with their places in the outputs."""
    planes = geometry.planes
    memory = scratch.take("positions", 2 * layout.nnz, torch.int32, torch.device("cpu"))
    places, kept = memory[: layout.nnz].numpy(), memory[layout.nnz :].view(torch.float32).numpy()
    begins = np.empty(planes.number + 1, np.int64)
    taps = kernel_module("convolutions").Taps(places, kept, begins)
    group, rows = (
        (geometry.weight[0] // geometry.groups, planes.of_group),
        (planes.stride, planes.margin),
    )
    weight = weight_of(layout, values)
    kernel_module("convolutions").transposed_places(weight, planes.columns, group, rows, taps)
    return taps


def _memory(use: Use, numbers: int) -> Tensor:
    return scratch.take(use, numbers, torch.float32, torch.device("cpu"))


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).numpy()
