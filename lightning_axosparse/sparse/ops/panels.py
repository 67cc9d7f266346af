"""Multiplies by a sparse weight, of which one panel at a time is materialized.

One panel of the weight's rows is materialized in scratch memory just before its product, and one
panel of the gradient is compressed just after. A panel takes no more memory than the activations
that it is multiplied with, or one tile. Products with narrow panels are slower, so a weight that is
small beside its activations is one panel; a large weight and its gradient never exist whole. The
products have the arguments of those in ``products.py``, of any dtype and on any device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse.sparse.store.layout import Layout, Tile, row_length
from lightning_axosparse.sparse.store.scratch import scratch

PANEL_ENTRIES = 2**24
"""The most entries of a panel of several tiles: wider panels make no product faster."""


def spmm_t(inputs: Tensor, values: Tensor, layout: Layout, bias: Tensor | None = None) -> Tensor:
    """Multiply ``inputs`` by the transposed weight; a panel computes some columns."""
    panels = _panels(layout, inputs.shape[:-1].numel())
    if len(panels) == 1:
        return F.linear(inputs, panels[0].dense(values, inputs.dtype), bias)
    flat = inputs.reshape(-1, inputs.shape[-1])
    result = inputs.new_empty(flat.shape[0], layout.shape[0])
    for panel in panels:
        factor, part = panel.dense(values, inputs.dtype).t(), result[:, panel.rows]
        if bias is None:
            torch.mm(flat, factor, out=part)
        else:
            torch.addmm(bias[panel.rows], flat, factor, out=part)
    return result.view(*inputs.shape[:-1], layout.shape[0])


def spmm(inputs: Tensor, values: Tensor, layout: Layout, bias: Tensor | None = None) -> Tensor:
    """Multiply ``inputs`` by the weight, as the sum over the panels.

    In 16 bits every partial sum would be rounded, so a weight of several panels is materialized
    whole there.
    """
    first, *others = _panels(layout, inputs.shape[:-1].numel())
    if not others:
        return F.linear(inputs, first.dense(values, inputs.dtype).t(), bias)
    columns = row_length(layout.shape)
    if inputs.dtype.itemsize < 4:
        whole = layout.densify(values.to(inputs.dtype)).view(-1, columns)
        return F.linear(inputs, whole.t(), bias)
    flat = inputs.reshape(-1, inputs.shape[-1])
    result = F.linear(flat[:, first.rows], first.dense(values, inputs.dtype).t(), bias)
    for panel in others:
        result.addmm_(flat[:, panel.rows], panel.dense(values, inputs.dtype))
    return result.view(*inputs.shape[:-1], columns)


def sddmm(left: Tensor, right: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the unpruned entries of ``left.t() @ right``, cast to a dtype."""
    values = left.new_empty(layout.nnz, dtype=dtype)
    for panel in _panels(layout, left.shape[0]):
        out = panel.memory(left.dtype, left.device)
        torch.mm(left[:, panel.rows].t(), right, out=out.view(-1, right.shape[1]))
        panel.compress(out, values)
    return values


@dataclass(slots=True)
class _Panel:
    """Consecutive tiles of a matrix that are dense at the same time."""

    layout: Layout
    tiles: list[Tile]

    @property
    def rows(self) -> slice:
        return slice(self.tiles[0].rows.start, self.tiles[-1].rows.stop)

    def memory(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return scratch memory for all entries, flat."""
        first, last = self.tiles[0], self.tiles[-1]
        return scratch.take("tile", last.start + last.numel - first.start, dtype, device)

    def dense(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the panel of the weight with these ``values``: a matrix in scratch memory."""
        out = self.memory(dtype, values.device)
        for tile, part in self._parts(out):
            self.layout.densify_tile(tile, values[tile.entries], part)
        return out.view(-1, row_length(self.layout.shape))

    def compress(self, dense: Tensor, values: Tensor) -> None:
        """Copy the unpruned entries of the flat ``dense`` panel to their part of ``values``."""
        for tile, part in self._parts(dense):
            self.layout.compress_tile(tile, part, values[tile.entries])

    def _parts(self, flat: Tensor) -> Iterable[tuple[Tile, Tensor]]:
        if len(self.tiles) == 1:
            return ((self.tiles[0], flat),)
        return zip(self.tiles, flat.split([tile.numel for tile in self.tiles]), strict=True)


def _panels(layout: Layout, n: int) -> list[_Panel]:
    """Split a weight into the fewest panels no larger than ``n`` rows of inputs and outputs."""
    tiles = layout.tiles
    if len(tiles) == 1:
        return [_Panel(layout, tiles)]
    room = min(n * (layout.shape[0] + row_length(layout.shape)), PANEL_ENTRIES)
    step = max(1, room // tiles[0].numel)
    step = -(-len(tiles) // -(-len(tiles) // step))  # the same number of panels, of equal size
    return [_Panel(layout, tiles[first : first + step]) for first in range(0, len(tiles), step)]
