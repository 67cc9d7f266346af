"""Defines the dense form of a sparse weight: in which dtype, and whether a copy is resident.

With ``compute="samo"`` (SAMO; Singh & Bhatele, IPDPS 2023) the dense weight stays in memory, in the
dtype that products run in, and is filled once per optimizer step. Else an operator multiplies by
the unpruned values, or by a dense weight that is materialized, in parts, at every use. In graphs of
torch.compile it is dense, and the backward pass materializes it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_axosparse.sparse.backend import AUTO, Backend
from lightning_axosparse.sparse.store.copies import DenseCopy


def copy_pays(sixteen_bit: bool, passes: int, sparse_products: bool) -> bool:
    """Return whether a resident dense copy saves more than it takes (``benchmarks/overhead``).

    A resident copy saves the time to materialize the weight in every forward and backward pass
    after the first. In float32 that time is short and the copy takes 4 bytes per weight; in 16 bits
    it is long and the copy takes 2. Sparse products need no dense weight.

    Args:
        sixteen_bit: whether products run in bfloat16 or float16.
        passes: forward and backward passes (micro-batches) per optimizer step.
        sparse_products: whether products run on the unpruned values.
    """
    return sixteen_bit and passes > 1 and not sparse_products


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the unpruned values of a weight of ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype on ``device``; None while it is off, and on the meta device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return an operand as autocast with this dtype casts it."""
    follows = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if follows else tensor


@dataclass(eq=False)
class DenseForm:
    """The dense form of one sparse parameter, shared by all modules that have the parameter.

    Attributes:
        dtype: dtype of the dense-shaped weight. The unpruned values have this or a wider one.
        copy: the dense copy that stays in memory; None without ``compute="samo"``.
        backend: whether products use the unpruned values, a dense weight, or the faster of these.
    """

    dtype: torch.dtype
    copy: DenseCopy | None = None
    backend: Backend = AUTO

    def compute_by(self, backend: Backend) -> None:
        """Set how products run, and keep a dense copy if they use one."""
        self.backend = backend
        keeps_copy = backend.compute == "samo"
        if keeps_copy != (self.copy is not None):
            self.copy = DenseCopy() if keeps_copy else None

    def move(self, dtype: torch.dtype) -> None:
        """Change the weight's dtype; the values may have moved to another device."""
        self.dtype = dtype
        if self.copy is not None:
            self.copy.release()

    def for_values(self, values: Tensor, training: bool) -> DenseForm:
        """Return the dense form of ``values``, which a functional call may have passed.

        Only the parameter itself has a resident copy, whose dtype is set here. A parameter created
        in inference mode has none, because torch counts no changes of it.
        """
        if self.copy is None:
            return self
        if torch.compiler.is_compiling():
            return DenseForm(self.dtype, backend=self.backend)
        if not isinstance(values, nn.Parameter) or values.is_inference() or values.is_meta:
            return DenseForm(self.dtype, backend=self.backend)
        autocast = None if self.dtype == torch.float64 else autocast_dtype(values.device)
        self.copy.configure(autocast or self.dtype, training)
        return self
