"""Fills the resident dense copies of weights when their unpruned values may have changed.

After an optimizer step every copy on a GPU has to be filled again. The first one that is used fills
all of them in one launch, because a launch for each weight takes Python longer than it takes the
GPU to fill them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_axosparse.sparse.store.formats import BitmapLayout
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.torch_internals import version_of


class _Contents(NamedTuple):
    """The unpruned values of a copy, their layout, and the dense tensor that gets them."""

    values: Tensor
    layout: Layout
    dense: Tensor

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be the same for all copies that one launch fills."""
        return self.dense.device, self.dense.dtype, self.values.dtype


class DenseCopy:
    """The resident dense copy of one weight, filled again when its values may have changed.

    They may have changed when their version has, when an optimizer has stepped (fused optimizers
    change no version), and when the module has switched between training and evaluation (averaged
    weights may be swapped in through ``.data``, which changes no version either).

    Attributes:
        dtype: the dtype of the copy; None before the first read.
        dense: the dense tensor, if memory is allocated for it.
        contents: what it was filled from, and the dense tensor; None if it has to be filled anew.
        is_used: whether it was used since it was filled.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.contents: _Contents | None = None
        self.is_used = False
        self._training = True
        self.dense: Tensor | None = None
        self._filled_at = (-1, -1)
        self._copies: _Copies | None = None

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
        self.contents = None

    def release(self) -> None:
        """Free the memory until the next use."""
        self.dense = self.contents = None

    def filled(self, values: Tensor, layout: Layout) -> Tensor:
        """Return the copy with the current values; valid until they change.

        Args:
            values: unpruned values, shape ``(layout.nnz,)``, any dtype.
            layout: their layout.
        """
        contents = self.contents
        if contents is None or contents.values.data_ptr() != values.data_ptr() or self.is_stale():
            # Keep the values' storage alive, so that no others are allocated at its address. The
            # parameter itself would follow to the address of new ``data``.
            self.contents = contents = _Contents(
                values.detach(), layout, self._allocated(values, layout)
            )
            if self._copies is None:
                self._copies = _copies_of_process()
                self._copies.add(self)
            self._copies.fill(self, contents)
        self.is_used = True
        return contents.dense

    def _allocated(self, values: Tensor, layout: Layout) -> Tensor:
        if self.dense is None:
            # A tensor created in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self.dense = torch.empty(layout.shape, dtype=self.dtype, device=values.device)
        return self.dense

    def is_stale(self) -> bool:
        """Return whether the values may have changed since the copy was filled."""
        assert self.contents is not None
        assert self._copies is not None
        return self._filled_at != (version_of(self.contents.values), self._copies.steps)

    def set_filled(self) -> None:
        """Remember that the copy has the current values."""
        assert self.contents is not None
        assert self._copies is not None
        self._filled_at = version_of(self.contents.values), self._copies.steps
        self.is_used = False

    def __reduce__(self) -> Any:
        return DenseCopy, ()


class _Copies:
    """All resident copies of this process.

    A copy does not know which optimizers hold its parameter, so one of torch's hooks for all
    optimizers serves all copies, and goes with the last of them.

    Attributes:
        steps: the number of steps of all optimizers while there are copies.
    """

    def __init__(self) -> None:
        counter = weakref.proxy(self)
        handle = register_optimizer_step_post_hook(lambda *_: counter.count_step())
        weakref.finalize(self, handle.remove)
        self.steps = 0
        self._copies: weakref.WeakSet[DenseCopy] = weakref.WeakSet()
        self._rows: list[list[int]] = []
        self._table: tuple[Tensor, Tensor] | None = None

    def count_step(self) -> None:
        """Count a step of an optimizer."""
        self.steps += 1

    def add(self, copy: DenseCopy) -> None:
        """Add a copy, until it is freed."""
        self._copies.add(copy)

    def fill(self, copy: DenseCopy, contents: _Contents) -> None:
        """Fill a copy, and on a GPU all others that are in use and stale."""
        values, layout, dense = contents
        kernels = layout.kernels_together(values, dense)
        together = {copy: contents}
        if kernels is not None:
            together |= self._stale(contents.kind)
        if kernels is None or len(together) == 1:
            layout.fill(dense, values)
        else:
            table = self._table_of(list(together.values()))
            kernels.densify_together(*table, values.dtype, dense.dtype)
        for each in together:
            each.set_filled()

    def _stale(self, kind: tuple[Any, ...]) -> dict[DenseCopy, _Contents]:
        """Return the copies of a kind that one launch can fill, and that were used."""
        return {
            copy: contents
            for copy in self._copies
            if copy.is_used and (contents := copy.contents) is not None
            if contents.kind == kind and copy.is_stale()
            if contents.layout.kernels_together(contents.values, contents.dense) is not None
        }

    def _table_of(self, weights: Sequence[_Contents]) -> tuple[Tensor, Tensor]:
        """Return the table of weights, and the row of each program."""
        rows, blocks = list[list[int]](), list[int]()
        for values, layout, dense in sorted(weights, key=lambda each: each.dense.data_ptr()):
            assert isinstance(layout, BitmapLayout)
            rows.append([*layout.table_row(values, dense), sum(blocks)])
            blocks.append(len(layout.starts) - 1)
        if self._table is None or rows != self._rows:  # In training they stay the same.
            device = weights[0].dense.device
            owners = torch.arange(len(rows), dtype=torch.int32)
            owners = owners.repeat_interleave(torch.tensor(blocks)).to(device)
            self._rows, self._table = rows, (torch.tensor(rows, device=device), owners)
        return self._table


_process: weakref.WeakValueDictionary[str, _Copies] = weakref.WeakValueDictionary()


def _copies_of_process() -> _Copies:
    copies = _process.get("copies")
    if copies is None:
        copies = _process["copies"] = _Copies()
    return copies
