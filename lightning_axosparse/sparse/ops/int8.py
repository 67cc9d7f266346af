"""Rounds the unpruned values of a weight to eight bits, and multiplies by them on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse.sparse.kernels import (
    SEGMENT,
    SMALLEST,
    ZERO,
    Weight,
    kernel_module,
    reference,
)
from lightning_axosparse.sparse.ops import products
from lightning_axosparse.sparse.store.formats import SegmentLayout, layout_of
from lightning_axosparse.sparse.store.layout import Layout, block_rows, row_length
from lightning_axosparse.sparse.store.scratch import scratch
from lightning_axosparse.support.memory import reusable_empty
from lightning_axosparse.support.threads import run_in_threads

MOST_TOKENS = 16
"""The most tokens that are multiplied in integers (``benchmarks/inference``)."""


@dataclass(eq=False)
class Int8Weight:
    """A sparse matrix whose unpruned values have eight bits.

    Attributes:
        layout: the positions of the values.
        values: int8, from -127 to 127, shape ``(layout.nnz,)``.
        scales: by what those of each row are to be multiplied, float32.
        sums: the sum of each row's values, int32.
    """

    layout: Layout
    values: Tensor
    scales: Tensor
    sums: Tensor

    @classmethod
    def nearest(cls, values: Tensor, layout: Layout) -> Int8Weight:
        """Round unpruned values to the nearest of 255 multiples of a scale for each row."""
        rows = layout.positions().long() // row_length(layout.shape)
        values = values.detach().float()
        largest = values.new_zeros(layout.shape[0]).scatter_reduce(0, rows, values.abs(), "amax")
        scales = largest / 127
        rounded = (values / scales[rows]).nan_to_num(0).round().to(torch.int8)
        sums = torch.zeros_like(scales, dtype=torch.int32).index_add(0, rows, rounded.int())
        return cls(layout, rounded, scales, sums)

    @cached_property
    def arrays(self) -> tuple[Weight, Any, Any]:
        """The weight as the loops read it, its scales and its sums; on CPU."""
        assert isinstance(self.layout, SegmentLayout)
        weight = Weight(*self.layout.read_by_loops, self.values.numpy())
        return weight, self.scales.numpy(), self.sums.numpy()

    def dense(self) -> Tensor:
        """Return the dense matrix, float32."""
        return self.layout.densify(self.values.float()) * self.scales[:, None]

    def to(self, device: torch.device) -> Int8Weight:
        """Return this weight on a device."""
        tensors = {name: getattr(self, name).to(device) for name in ("values", "scales", "sums")}
        return replace(self, layout=self.layout.to(device), **tensors)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields; cached properties are not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def multiply(inputs: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply ``inputs``, rounded to eight bits, by the transposed weight.

    Each token is rounded by its largest absolute value (dynamic quantization), so its outputs do
    not depend on other tokens. Few tokens are multiplied in integers, if the processor has the
    instructions. More are multiplied in float32, in which the same integers are exact up to 2**24.

    Args:
        inputs: shape ``(..., columns)``, floating.
        weight: shape ``(rows, columns)``.
        bias: shape ``(rows,)``.

    Returns:
        A tensor of shape ``(..., rows)``, of the dtype of ``inputs``.
    """
    if not products.can_read(weight.layout, weight.values):
        return multiply_densely(inputs, weight, bias)
    tokens = inputs.shape[:-1].numel()
    if 0 < tokens <= MOST_TOKENS and kernel_module("int8").HAS_BYTES:
        return _in_integers(inputs, tokens, weight, bias)
    rounded, scales = _rounded(inputs)
    values = weight.values if tokens == 1 else weight.values.float()
    sums = products.spmm_t(rounded, values, weight.layout)
    return _scaled(sums, scales, weight, bias).to(inputs.dtype)


def multiply_densely(inputs: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`multiply` by torch's operators alone, for compilers and transforms."""
    rounded, scales = _rounded(inputs)
    layout = weight.layout
    matrix = reference.scatter(weight.values.float(), layout.positions(), layout.shape)
    sums = F.linear(rounded, matrix)
    return _scaled(sums, scales, weight, bias).to(inputs.dtype)


def _rounded(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded inputs, from -127 to 127, and the scale of each token."""
    inputs = inputs.float()
    largest = inputs.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > SMALLEST, 127 / largest, 0)
    return (inputs * factors + (ZERO + 0.5)).trunc() - ZERO, largest / 127  # as the loops round


def _scaled(sums: Tensor, scales: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    outputs = sums * (scales * weight.scales)
    return outputs if bias is None else outputs + bias.float()


@cache
def load_loops() -> None:
    """Compile the loops, or load them from numba's cache, before a product needs them."""
    products.load_loops()
    layout = layout_of(torch.ones(1, 64, dtype=torch.bool, device="cpu"), "segments")
    weight = Int8Weight.nearest(torch.ones(64, device="cpu"), layout)
    for tokens in (1, MOST_TOKENS):
        multiply(torch.ones(tokens, 64, device="cpu"), weight)


def _in_integers(inputs: Tensor, tokens: int, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    loops, (stored, *scales) = kernel_module("int8"), weight.arrays
    size = -(-stored.width // SEGMENT) * SEGMENT * tokens
    memory = scratch.take("rounded", size, torch.uint8, torch.device("cpu"))
    rounded = loops.Rounded(memory.numpy(), np.empty(tokens, np.float32))
    loops.round_inputs(products.as_array(inputs), stored.width, rounded)
    result = reusable_empty((*inputs.shape[:-1], stored.height))
    scale, outputs = loops.Scale(*scales, products.bias_array(bias)), products.as_array(result)

    def part(first: int, last: int) -> None:
        start = products.entries_before(weight.layout, first)
        loops.spmm_t(rounded, stored, (first, last), start, scale, outputs)

    work = tokens * weight.layout.nnz
    run_in_threads(part, stored.height, block_rows(weight.layout.shape), work)
    return result.to(inputs.dtype)
