"""Fills the resident dense copies of weights when their unpruned values may have changed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.torch_internals import version_of


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
        self.dense: Tensor | None = None
        self._training = True
        self._source: Tensor | None = None
        """The values with which it was filled; None if it has to be filled anew."""
        self._filled_at = (-1, -1)

    def configure(self, dtype: torch.dtype, training: bool) -> None:
        """Set the dtype and the module's mode; a change fills the copy at its next use."""
        if dtype != self.dtype:
            self.dtype = dtype
            self.release()
        if training != self._training:
            self._training = training
            self.invalidate()

    def invalidate(self) -> None:
        """Fill the copy again at its next use: the values have changed, maybe without a version."""
        self._source = None

    def release(self) -> None:
        """Free the memory until the next use."""
        self.dense = self._source = None

    def filled(self, values: Tensor, layout: Layout) -> Tensor:
        """Return the copy with the current values; valid until they change.

        Args:
            values: unpruned values, shape ``(layout.nnz,)``, any dtype.
            layout: their layout.
        """
        if self.dense is None:
            # A tensor created in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self.dense = torch.empty(layout.shape, dtype=self.dtype, device=values.device)
        source, now = self._source, (version_of(values), _optimizer_steps().count)
        if source is None or source.data_ptr() != values.data_ptr() or now != self._filled_at:
            layout.fill(self.dense, values)
            # Keep the values' storage alive, so that no others are allocated at its address. The
            # parameter itself would follow to the address of new ``data``.
            self._source, self._filled_at = values.detach(), now
        return self.dense

    def __reduce__(self) -> Any:
        return DenseCopy, ()


class _Steps:
    """The steps of all optimizers in this process since the first use of a dense copy."""

    count = 0


@cache
def _optimizer_steps() -> _Steps:
    """Count steps from the first call on: a dense copy does not know its parameter's optimizers."""
    steps = _Steps()

    def add(*_: Any) -> None:
        steps.count += 1

    register_optimizer_step_post_hook(add)
    return steps
