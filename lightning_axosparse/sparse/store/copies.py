"""Fills the resident dense copies of weights when their unpruned values may have changed.

After an optimizer step every copy on a GPU has to be filled again. The first one that is used fills
all of them in one launch. Layers multiply by these copies with torch's own operators: they are the
outputs of autograd nodes on the unpruned values. A node serves a bucket of weights that are used
one after the other, and compresses their gradients in one launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.store.formats import BitmapLayout
from lightning_axosparse.sparse.store.layout import Layout, check_unchanged
from lightning_axosparse.support.torch_internals import backward_transformed, version_of

BUCKET_ENTRIES = 2**26
"""The most entries of a bucket, whose dense gradients are in memory at once: 128 MB in 16 bits."""
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
    """Densifies and compresses weights of one kind, and caches the tables that kernels read.

    Where a kernel can, it serves several weights in one launch: to start one for each takes Python
    longer than it takes a GPU to run them.
    """

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
        parameter: the values of the last product that recorded gradients.
        node_output: the dense tensor as the output of an autograd node on ``parameter``, if there
            is one for the current values.
        turn: the place of that product among those of all copies.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.contents: WeightTensors | None = None
        self.is_used = False
        self.parameter: Tensor | None = None
        self.node_output: Tensor | None = None
        self.turn = 0
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
        self.contents = self.node_output = None

    def release(self) -> None:
        """Free the memory until the next use."""
        self.invalidate()
        self.dense = None

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
            self.contents = contents = WeightTensors(
                values.detach(), layout, self._allocated(values, layout)
            )
            if self._copies is None:
                self._copies = _copies_of_process()
                self._copies.add(self)
            self._copies.fill(self, contents)
        self.is_used = True
        return contents.dense

    def differentiable(self, values: Tensor, layout: Layout) -> Tensor | None:
        """Return the copy with an autograd node that makes it a function of the values.

        Args:
            values: a parameter that requires a gradient, shape ``(layout.nnz,)``.
            layout: its layout.

        Returns:
            The copy; None where no kernel serves several weights: a processor compresses each
            panel of a gradient faster while it is in the cache.
        """
        dense = self.filled(values, layout)
        assert self._copies is not None
        if self.node_output is None or self.parameter is not values:
            if layout.kernels_together(values, dense) is None:
                return None
            self.parameter = values
            _connect([self])
        self._copies.turn += 1
        self.turn = self._copies.turn
        return self.node_output

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
        self.node_output = None

    def __reduce__(self) -> Any:
        return DenseCopy, ()


class _Copies:
    """All resident copies of this process.

    A copy does not know which optimizers hold its parameter, so one of torch's hooks for all
    optimizers serves all copies, and goes with the last of them.

    Attributes:
        steps: the number of steps of all optimizers while there are copies.
        turn: the number of products that have recorded gradients.
        launches: their kernels.
    """

    def __init__(self) -> None:
        counter = weakref.proxy(self)
        handle = register_optimizer_step_post_hook(lambda *_: counter.count_step())
        weakref.finalize(self, handle.remove)
        self.steps = self.turn = 0
        self.launches = Launches()
        self._copies: weakref.WeakSet[DenseCopy] = weakref.WeakSet()

    def count_step(self) -> None:
        """Count a step of an optimizer."""
        self.steps += 1

    def add(self, copy: DenseCopy) -> None:
        """Add a copy, until it is freed."""
        self._copies.add(copy)

    def fill(self, copy: DenseCopy, contents: WeightTensors) -> None:
        """Fill a copy, and on a GPU all others that are in use and stale."""
        together = {copy: contents}
        if contents.kernels is not None:
            together |= self._stale(contents.kind)
        in_order = sorted(together, key=lambda each: each.turn)
        self.launches.densify([together[each] for each in in_order])
        for each in in_order:
            each.set_filled()
        for bucket in _buckets(in_order):
            _connect(bucket)

    def _stale(self, kind: tuple[Any, ...]) -> dict[DenseCopy, WeightTensors]:
        """Return the copies of a kind that one launch can fill, and that were used."""
        return {
            copy: contents
            for copy in self._copies
            if copy.is_used and (contents := copy.contents) is not None
            if contents.kind == kind and copy.is_stale() and contents.kernels is not None
        }


def _buckets(copies: Sequence[DenseCopy]) -> list[list[DenseCopy]]:
    """Divide copies, in the order of their use, into buckets of at most ``BUCKET_ENTRIES``."""
    buckets: list[list[DenseCopy]] = []
    room = 0
    for copy in copies:
        if copy.parameter is None or not copy.parameter.requires_grad:
            continue
        assert copy.contents is not None
        size = copy.contents.dense.numel()
        if size > room:
            buckets.append([])
            room = BUCKET_ENTRIES
        buckets[-1].append(copy)
        room -= size
    return buckets


def _connect(copies: Sequence[DenseCopy]) -> None:
    """Give the copies of a bucket their autograd node."""
    weights = [copy.contents for copy in copies]
    with torch.inference_mode(False), torch.enable_grad():
        outputs = _Densify.apply(weights, *(copy.parameter for copy in copies))  # type: ignore[no-untyped-call]
    for copy, output in zip(copies, outputs, strict=True):
        copy.node_output = output


class _Densify(torch.autograd.Function):
    """The dense copies of a bucket as functions of the unpruned values.

    All products until the next optimizer step use the same outputs, so it saves no tensors: a
    backward pass would free them. The kernels that fill the copies again count no change of them,
    so the versions of the values tell whether a backward pass comes too late.
    """

    @staticmethod
    def forward(ctx: Any, weights: Sequence[WeightTensors], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.copies, ctx.values = _copies_of_process(), values
        ctx.layouts = [each.layout for each in weights]
        ctx.versions = [version_of(each) for each in values]
        return tuple(each.dense.detach() for each in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * len(gradients)
        compressed = []
        for at, gradient in enumerate(gradients):
            if gradient is None:
                continue
            values, layout = ctx.values[at], ctx.layouts[at]
            check_unchanged(values, ctx.versions[at], layout)
            if backward_transformed(gradient):
                results[at] = reference.gather(gradient, layout.positions()).to(values.dtype)
            else:
                results[at] = out = values.new_empty(layout.nnz)
                compressed.append(WeightTensors(out, layout, gradient.contiguous()))
        ctx.copies.launches.compress(compressed)
        return None, *results


_process: weakref.WeakValueDictionary[str, _Copies] = weakref.WeakValueDictionary()


def _copies_of_process() -> _Copies:
    copies = _process.get("copies")
    if copies is None:
        copies = _process["copies"] = _Copies()
    return copies
