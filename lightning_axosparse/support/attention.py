"""Runs float32 attention in compiled loops, on the processors on which MKL is slow.

On AMD's processors with AVX-512, torch's kernel of ``F.scaled_dot_product_attention`` multiplies
its small matrices by MKL, and takes 1.6 to 3 times as long as ``attention_loops.py``
(``benchmarks/overhead/attention.py``). torch's kernel still runs what the loops do not: masks, 16
bits, sizes of heads that are no multiples of 16, and few tokens. The choice depends only on the
shape of a head, so it is the same in all passes, schedules and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.support.threads import run_in_threads

MIN_MULTIPLICATIONS = 2**18
"""Smaller products of a head's queries and keys gain little."""

_SIZES = 16
"""Sizes of heads are multiples of this."""

_Operands = tuple[Tensor, Tensor, Tensor]


def _attend(
    own: Callable[..., Any],
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the logarithms of the softmax's sums; ``own`` is torch's kernel."""
    operands = query, key, value
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    if dropout_p or attn_mask is not None or not _runs_in_loops(operands, scale):
        others = {"attn_mask": attn_mask, "scale": scale}
        results: tuple[Tensor, Tensor] = own(keys, *operands, dropout_p, is_causal, **others)
        return results
    batch, heads, tokens, _ = query.shape
    outputs = torch.empty_like(query)
    logarithms = query.new_empty(batch, tokens, heads).transpose(1, 2)
    _run("attend", operands, is_causal, scale, _heads(outputs), _heads(logarithms))
    return outputs, logarithms


def _attend_backward(
    own: Callable[..., Any],
    keys: Any,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outputs: Tensor,
    logarithms: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> _Operands:
    """Return the gradients of the operands; ``own`` is torch's kernel."""
    operands = query, key, value
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    if dropout_p or attn_mask is not None or not _runs_in_loops(operands, scale):
        results = *operands, outputs, logarithms, dropout_p, is_causal
        others = {"attn_mask": attn_mask, "scale": scale}
        gradients: _Operands = own(keys, gradient, *results, **others)
        return gradients
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    for_query, for_key, for_value = map(_gradient_of, operands)
    read = map(_heads, (outputs, logarithms, gradient))
    written = tuple(map(_heads, (for_query, for_key.zero_(), for_value.zero_())))
    _run("attend_backward", operands, is_causal, scale, *read, written)
    return for_query, for_key, for_value


KERNELS: Mapping[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attend,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attend_backward,
}
"""Operator -> the kernel that replaces torch's own, with which it is called."""


def _runs_in_loops(operands: _Operands, scale: float) -> bool:
    query, key, value = operands
    return (
        all(each.dtype is torch.float32 and each.stride(-1) == 1 for each in operands)
        and all(each.numel() for each in operands)
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[1] % key.shape[1] == 0
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % _SIZES == 0
        and query.shape[2] * key.shape[2] * query.shape[3] >= MIN_MULTIPLICATIONS
        and scale > 0
    )


def _run(name: str, operands: _Operands, is_causal: bool, scale: float, *results: Any) -> None:
    """Run a loop on all heads."""
    query, key, _ = operands
    loops, arrays = _loops(), tuple(map(_heads, operands))
    batch, heads, tokens, size = query.shape
    sharing = heads // key.shape[1]
    shape = loops.Shape(heads, sharing, tokens, key.shape[2], size)

    def part(first: int, last: int) -> None:
        getattr(loops, name)(shape, arrays, (first, last), is_causal, scale, *results)

    run_in_threads(part, batch * heads, sharing, query.numel() * key.shape[2])


@cache
def _loops() -> Any:
    """Return the module of the loops, compiled; importing it takes a second."""
    from lightning_axosparse.support import attention_loops as loops
    from lightning_axosparse.support.compilation import compilation

    heads = _heads(torch.zeros(1, 1, 1, _SIZES, dtype=torch.float32, device="cpu"))
    part = loops.Shape(1, 1, 1, 1, _SIZES), (heads, heads, heads), (0, 1), True, 1.0
    with compilation():
        loops.attend(*part, heads, heads)
        loops.attend_backward(*part, heads, heads, heads, (heads, heads, heads))
    return loops


def _heads(tensor: Tensor) -> Any:
    """Return a tensor as the loops read it: the memory over which it extends, and its strides."""
    from lightning_axosparse.support.attention_loops import Heads

    strides = tensor.stride()
    extent = sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)) + 1
    flat = tensor.detach().as_strided((extent,), (1,))
    return Heads(flat.numpy(), *strides[:3])


def _gradient_of(operand: Tensor) -> Tensor:
    """Return memory for a gradient, with the strides that torch's kernel gives it."""
    batch, heads, tokens, size = operand.shape
    return operand.new_empty(batch, tokens, heads, size).transpose(1, 2)
