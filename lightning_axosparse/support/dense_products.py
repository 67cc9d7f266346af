"""Runs large float32 matrix products by oneDNN, on the processors on which it is faster.

torch uses MKL. On AMD's processors with AVX-512, oneDNN takes as little as half of MKL's time, and
torch has no setting for it; on AMD's other processors, MKL is faster. The CPU kernels of ``mm`` and
``addmm`` are replaced, so this applies to linear layers, their gradients and the panels of sparse
weights. The choice depends only on the shapes of a product, so it is the same in all passes,
schedules and runs. ``benchmarks/overhead/dense_products.py`` compares the two. The small products
of attention, which are slow by both, run in loops (``attention.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_axosparse.support import attention
from lightning_axosparse.support.patched import kernels_replaced
from lightning_axosparse.support.torch_internals import onednn_product

MIN_MULTIPLICATIONS = 2**22
"""Smaller products gain nothing, as a call of oneDNN takes longer than one of MKL."""

MIN_ROWS = 8
"""With fewer rows, reading the other matrix takes most of the time."""

MIN_WEIGHT = 2**14
"""Smaller weights have few large products, and every other product takes 1.5 us longer."""


_Kernel = Callable[..., Tensor]


def onednn_is_faster(shapes: Iterable[torch.Size]) -> bool:
    """Return whether a module's large products should run by oneDNN on this processor.

    It returns False if ``torch.backends.mkldnn.enabled`` is False.

    Args:
        shapes: the shapes of the full module's parameters.
    """
    onednn = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled and _amd_with_avx512()):
        return False
    return any(len(shape) > 1 and shape.numel() >= MIN_WEIGHT for shape in shapes)


def without_mkl() -> AbstractContextManager[None]:
    """Run large float32 products by oneDNN, and attention in loops, inside the context."""
    return kernels_replaced({**_KERNELS, **attention.KERNELS})


def _amd_with_avx512() -> bool:
    info = cpu_info()
    return info["vendor_id"] == "AuthenticAMD" and "avx512f" in info["flags"].split()


def _product(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor | None:
    """Multiply by oneDNN; return None if torch's kernel has to run, which also raises errors."""
    is_large = (
        left.dim() == right.dim() == 2
        and left.numel() * right.shape[1] >= MIN_MULTIPLICATIONS
        and left.shape[0] >= MIN_ROWS
        and left.dtype is right.dtype is torch.float32
        and left.shape[1] == right.shape[0]
    )
    if not is_large:
        return None
    if added is None:
        return onednn_product(left, right)
    if added.dtype is not torch.float32:
        return None
    if added.shape == right.shape[1:]:
        return onednn_product(left, right, added.contiguous())
    if added.shape == (left.shape[0], right.shape[1]):
        return onednn_product(left, right).add_(added)
    return None


def _kernel(
    own: _Kernel, keys: Any, *matrices: Tensor, out: Tensor | None = None, **scales: Any
) -> Tensor:
    """Compute ``mm(left, right)`` or ``addmm(added, left, right)``; ``own`` is torch's kernel."""
    *added, left, right = matrices
    product = None if scales else _product(left, right, *added)
    if out is None:
        return own(keys, *matrices, **scales) if product is None else product
    if _fits(product, out):
        return out.copy_(product)
    return own(keys, *matrices, out=out, **scales)


def _addmm_in_place(
    own: _Kernel, keys: Any, added: Tensor, left: Tensor, right: Tensor, **scales: Any
) -> Tensor:
    product = None if scales else _product(left, right)
    if _fits(product, added):
        return added.add_(product)
    return own(keys, added, left, right, **scales)


def _fits(product: Tensor | None, out: Tensor) -> TypeGuard[Tensor]:
    return product is not None and out.shape == product.shape and out.dtype is product.dtype


_KERNELS: Mapping[str, _Kernel] = {
    **dict.fromkeys(("mm", "addmm", "mm.out", "addmm.out"), _kernel),
    "addmm_": _addmm_in_place,
}
"""Operator -> the kernel that replaces torch's own, with which it is called."""


@cache
def cpu_info() -> Mapping[str, str]:
    """Return Linux's description of the first core, such as "vendor_id" and "flags".

    An entry that is missing there is an empty text, as all are on other systems.
    """
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    pairs = (line.partition(":") for line in first.splitlines())
    return defaultdict(str, {name.strip(): value.strip() for name, _, value in pairs})
