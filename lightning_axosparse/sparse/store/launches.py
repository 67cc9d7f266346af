"""Densifies or compresses several weights in one launch, where a kernel can do so.

Starting a kernel for each weight takes Python longer than it takes a GPU to run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_axosparse.sparse.store.formats import BitmapLayout
from lightning_axosparse.sparse.store.layout import Layout

_TABLES = 256
"""The most tables that are cached: addresses of weights stay, and those of gradients recur."""

_Table = tuple[Tensor, Tensor]


class WeightTensors(NamedTuple):
    """The unpruned values of a weight, or of its gradient, their layout, and the dense tensor."""

    values: Tensor
    layout: Layout
    dense: Tensor

    @property
    def kernels(self) -> ModuleType | None:
        """The kernels that serve this weight and others in one launch, if there are any."""
        return self.layout.kernels_together(self.values, self.dense)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be the same for all weights of a launch."""
        return self.dense.device, self.dense.dtype, self.values.dtype


class Launches:
    """Densifies and compresses weights of one kind, and caches the tables that kernels read."""

    def __init__(self) -> None:
        self._tables: dict[tuple[tuple[int, ...], ...], _Table] = {}

    def densify(self, weights: Sequence[WeightTensors]) -> None:
        """Write the values, and zeros, to each dense tensor; several weights have kernels."""
        if len(weights) > 1:
            self._launch("densify_together", weights)
        else:
            for values, layout, dense in weights:
                layout.fill(dense, values)

    def compress(self, weights: Sequence[WeightTensors]) -> None:
        """Copy the unpruned entries of each dense tensor to the values, likewise."""
        if len(weights) > 1:
            self._launch("compress_together", weights)
        else:
            for values, layout, dense in weights:
                layout.read(dense, values)

    def _launch(self, kernel: str, weights: Sequence[WeightTensors]) -> None:
        first = weights[0]
        assert first.kernels is not None
        dtypes = first.values.dtype, first.dense.dtype
        getattr(first.kernels, kernel)(*self._table(weights), *dtypes)

    def _table(self, weights: Sequence[WeightTensors]) -> _Table:
        """Return the rows of weights, and the row of the weight on which each program works."""
        rows, blocks = list[tuple[int, ...]](), list[int]()
        for values, layout, dense in weights:
            assert isinstance(layout, BitmapLayout)
            rows.append((*layout.table_row(values, dense), sum(blocks)))
            blocks.append(len(layout.starts) - 1)
        key = tuple(rows)
        if key not in self._tables:
            if len(self._tables) == _TABLES:
                self._tables.clear()
            device = weights[0].dense.device
            owners = torch.arange(len(rows), dtype=torch.int32)
            owners = owners.repeat_interleave(torch.tensor(blocks)).to(device)
            self._tables[key] = torch.tensor(rows, device=device), owners
        return self._tables[key]
