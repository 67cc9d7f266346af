"""Defines the dense form of a sparse weight, and fills the resident copy of "samo".

With ``compute="samo"`` (SAMO; Singh & Bhatele, IPDPS 2023) the dense weight stays in memory, in the
dtype that products run in, and is filled once per optimizer step. Else an operator multiplies by
the unpruned values, or by a dense weight that is materialized, in parts, at every use. In graphs of
torch.compile it is dense, and the backward pass materializes it again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_axosparse.sparse.backend import AUTO, Backend
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.torch_internals import version_of


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


class DenseCopy:
    """The resident dense copy of one weight, filled again when its values may have changed.

    They may have changed when their version has, when an optimizer has stepped (fused optimizers
    change no version), and when the module has switched between training and evaluation (averaged
    weights may be swapped in through ``.data``, which changes no version either).

    Attributes:
        dtype: the dtype of the copy; None before the first read.
        dense: the dense tensor, if memory is allocated for it.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self._training = True
        self.dense: Tensor | None = None
        self._source: Tensor | None = None
        self._filled_at = (-1, -1)
        self._steps: _OptimizerSteps | None = None

    def configure(self, dtype: torch.dtype, training: bool) -> None:
        """Set the dtype and the module's mode; a change fills the copy at its next use."""
        if dtype != self.dtype:
            self.dtype, self.dense = dtype, None
        if training != self._training:
            self._training = training
            self.invalidate()

    def invalidate(self) -> None:
        """Fill the copy again at its next use: the values have changed, maybe without a version."""
        self._source = None

    def filled(self, values: Tensor, layout: Layout) -> Tensor:
        """Return the copy with the current values; valid until they change.

        Args:
            values: unpruned values, shape ``(layout.nnz,)``, any dtype.
            layout: their layout.
        """
        if self._steps is None:
            self._steps = _optimizer_steps()
        state = version_of(values), self._steps.count
        source = self._source
        if self.dense is None or source is None or source.data_ptr() != values.data_ptr():
            self._filled_at = (-1, -1)
        if state != self._filled_at:
            if self.dense is None:
                # A tensor created in inference mode could not be written outside it.
                with torch.inference_mode(False):
                    self.dense = torch.empty(layout.shape, dtype=self.dtype, device=values.device)
            layout.fill(self.dense, values)
            # Keep the values' storage alive, so that no other values are allocated at its address.
            # The parameter itself would follow to the address of new ``data``.
            self._source, self._filled_at = values.detach(), state
        assert self.dense is not None
        return self.dense

    def release(self) -> None:
        """Free the memory until the next use."""
        self.dense = self._source = None

    def __reduce__(self) -> Any:
        return DenseCopy, ()


class _OptimizerSteps:
    """Counts the steps of all optimizers in this process while there are dense copies.

    A dense copy does not know which optimizers hold its parameter, so one of torch's hooks for all
    optimizers serves all copies, and goes with the last of them.
    """

    def __init__(self) -> None:
        counter = weakref.proxy(self)
        handle = register_optimizer_step_post_hook(lambda *_: counter.add())
        weakref.finalize(self, handle.remove)
        self.count = 0

    def add(self) -> None:
        self.count += 1


_counters: weakref.WeakValueDictionary[str, _OptimizerSteps] = weakref.WeakValueDictionary()


def _optimizer_steps() -> _OptimizerSteps:
    counter = _counters.get("of this process")
    if counter is None:
        counter = _counters["of this process"] = _OptimizerSteps()
    return counter
