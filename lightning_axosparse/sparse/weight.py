"""Weight: a tensor with the dense shape that holds only its kept entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.sparse.compiled import recomputed_densify
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.layout import Layout, row_length
from lightning_axosparse.sparse.leaf import Leaf
from lightning_axosparse.sparse.reading import Reading, Resident
from lightning_axosparse.sparse.transforms import (
    differentiates_forward,
    transforms,
    transforms_backward,
)
from lightning_axosparse.sparse.versions import Seen, check_unchanged, version_of
from lightning_axosparse.sparse.writing import mapped, write_through, written_by

_to_copy = torch.ops.aten._to_copy.default
_add = torch.ops.aten.add.Tensor

OWN_WAY_ENTRIES = 2**18
"""Weights with fewer entries are made dense whole: a Python call costs more than it saves there."""

OWN_WAYS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Torch functions that need not see a whole dense weight, and what is called in their place, with
the same arguments; it returns NotImplemented where it does not apply. Filled by the package."""


def sparse_weight(values: Tensor, layout: Layout, reading: Reading | None = None) -> Tensor:
    """The dense-shaped weight whose kept entries are ``values``, differentiable in ``values``.

    Its gradient is compressed to the kept entries as soon as it is complete. While torch.compile
    traces, which cannot follow a wrapper into its operators, it is a dense tensor that the backward
    pass makes again, so none is saved there either. Under forward-mode differentiation and
    ``torch.jit.trace`` it is a plain dense one.

    Args:
        values: kept entries, shape ``(layout.nnz,)``, floating.
        layout: where they lie.
        reading: the weight's dtype, and its dense copy that stays; None: that of ``values``, none.
    """
    reading = reading or Reading(values.dtype)
    if torch.compiler.is_compiling():
        return recomputed_densify(values.to(reading.dtype), layout)
    if differentiates_forward():
        return reference.scatter(values.to(reading.dtype), layout.positions(), layout.shape)
    large = layout.shape.numel() >= OWN_WAY_ENTRIES
    trained = large and torch.is_grad_enabled() and not transforms()
    kind = TrainedWeight if trained else SparseWeight
    weight: Tensor = _Expand.apply(values, layout, reading, kind)  # type: ignore[no-untyped-call]
    return weight


class SparseWeight(Leaf):
    """A dense-shaped tensor that is made dense only inside the operator that uses it.

    Views and casts of it stay sparse. Any other operator is given a dense copy that dies with it,
    or the resident one, so what autograd saves for backward is this small object and never a dense
    weight. An in-place operator writes through to the kept entries; what it writes elsewhere is
    dropped. It also stands for a gradient of which only the kept entries were computed.

    Attributes:
        kept: kept entries, shape ``(nnz,)``; shares storage with the parameter. Their dtype may be
            wider than the weight's.
        entries: their places in the tensor that this one is a view of.
    """

    kept: Tensor
    entries: Layout
    _resident: Resident | None
    _seen: Seen

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        layout: Layout,
        geometry: Tensor | None = None,
        resident: Resident | None = None,
    ) -> SparseWeight:
        """Wrap ``values``; size, strides, offset and dtype are those of ``geometry``, if given."""
        if geometry is None:
            geometry = torch.empty(layout.shape, dtype=values.dtype, device="meta")
        weight: SparseWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            geometry.size(),
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device=values.device,
        )
        weight.kept = values
        weight.entries = layout
        weight._resident = resident
        weight._seen = Seen(version_of(values))
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator: lazily if it is a view or a cast, on dense copies otherwise."""
        kwargs = kwargs or {}
        source = args[0] if args else None
        if isinstance(source, SparseWeight):
            # Casts in backward name the layout, too.
            if func is _to_copy and kwargs.get("layout", torch.strided) is torch.strided:
                asked = {key: value for key, value in kwargs.items() if key != "layout"}
                if asked.keys() <= {"dtype", "device", "non_blocking"}:
                    return source._converted(**asked)
            if func.is_view:
                views = func(source._geometry(), *args[1:], **kwargs)
                first = views if isinstance(views, Tensor) else views[0]
                if first.dtype == source.dtype:
                    return mapped(source._viewed, views, Tensor)
            if func is _add and len(args) == 2 and not kwargs and source._adds_to(args[1]):
                return source._with(source.unchanged() + args[1].unchanged())
        written = written_by(func, args, kwargs, SparseWeight)
        if written:
            return write_through(func, args, kwargs, written, SparseWeight)
        operand = SparseWeight.dense if func.is_view else SparseWeight.operand
        dense_args = mapped(operand, args, SparseWeight)
        return func(*dense_args, **{k: mapped(operand, v, SparseWeight) for k, v in kwargs.items()})

    def dense(self) -> Tensor:
        """A fresh plain tensor with this weight's entries, shape and strides.

        Raises:
            RuntimeError: if the kept values changed in place since this weight was read.
        """
        return self._strided(self._whole())

    def operand(self) -> Tensor:
        """This weight as a plain tensor to compute with, not to keep: the resident one or a copy.

        Raises:
            RuntimeError: as :meth:`dense`.
        """
        resident = self.resident()
        return self.dense() if resident is None else resident

    def resident(self) -> Tensor | None:
        """The dense copy that stays in memory, seen as this weight, if there is one as wide."""
        if self._resident is None or self._resident.dtype != self.dtype:
            return None
        self._check_version()
        return self._strided(self._resident.whole(self.kept, self.entries))

    def rows(self) -> bool:
        """Whether this is a matrix whose rows are whole rows of the stored tensor, in order."""
        rows = self.entries.shape[:1].numel()
        columns = row_length(self.entries.shape)
        return (
            self.size() == (rows, columns)
            and self.stride() == (columns, 1)
            and self.storage_offset() == 0
        )

    def tolist(self) -> Any:
        """The entries as nested lists."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The entries as a dense NumPy array."""
        return self.dense().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.dense(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"SparseWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"kept={self.entries.nnz} of {self.entries.shape.numel()})"
        )

    def unchanged(self) -> Tensor:
        """The kept values in the weight's dtype, if they are still those that were read."""
        self._check_version()
        return self.kept.to(self.dtype)

    def _check_version(self) -> None:
        check_unchanged(self.kept, self._seen.version, self.entries)

    def _whole(self) -> Tensor:
        """The dense tensor of the layout's shape, of which this weight is a view."""
        return self.entries.densify(self.unchanged())

    def _strided(self, base: Tensor) -> Tensor:
        return base.as_strided(self.size(), self.stride(), self.storage_offset())

    def _geometry(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        return self._strided(torch.empty(self.entries.shape, dtype=dtype, device="meta"))

    def _viewed(self, geometry: Tensor) -> SparseWeight:
        view = type(self)(self.kept, self.entries, geometry, self._resident)
        view._seen = self._seen
        return view

    def _with(self, values: Tensor) -> SparseWeight:
        return type(self)(values, self.entries, self._geometry())

    def _adds_to(self, other: Any) -> bool:
        """Whether the sum with ``other`` has its entries where both of them have theirs."""
        return (
            isinstance(other, SparseWeight)
            and other.entries is self.entries
            and other.dtype == self.dtype
            and (other.size(), other.stride(), other.storage_offset())
            == (self.size(), self.stride(), self.storage_offset())
        )

    def _converted(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        non_blocking: bool = False,
    ) -> SparseWeight:
        device = device or self.device
        dtype = dtype or self.dtype
        if self._resident is not None and device == self.device and self.kept.dtype == self.dtype:
            # Rounded by the resident copy as it is filled.
            return self._viewed(self._geometry(dtype))
        values = self.unchanged().to(device, dtype, non_blocking=non_blocking, copy=True)
        return type(self)(values, self.entries.to(device), self._geometry(dtype))


class TrainedWeight(SparseWeight):
    """A sparse weight read while gradients are wanted: some functions have a way of their own.

    Not so without gradients: a tensor that overrides torch functions would keep
    ``nn.TransformerEncoderLayer`` from its fast path.
    """

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function: its own way with sparse weights, if it has one and it applies."""
        with torch._C.DisableTorchFunctionSubclass():
            own_way = None if transforms() else OWN_WAYS.get(func)
            result = own_way(*args, **(kwargs or {})) if own_way else NotImplemented
            return func(*args, **(kwargs or {})) if result is NotImplemented else result


class _Expand(torch.autograd.Function):
    """Kept values to lazy weight; backward, dense gradient to gradient of the kept values."""

    @staticmethod
    def forward(
        values: Tensor, layout: Layout, reading: Reading, kind: type[SparseWeight]
    ) -> SparseWeight:
        geometry = torch.empty(layout.shape, dtype=reading.dtype, device="meta")
        return kind(values.detach(), layout, geometry, reading.resident)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layout = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return compress_gradient(gradient, ctx.layout), None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        values: Tensor,
        layout: Layout,
        reading: Reading,
        kind: type,
    ) -> tuple[Tensor, int | None]:
        """Stay lazy for one set of values under vmap; make several sets dense together."""
        if in_dims[0] is None:
            return sparse_weight(values, layout, Reading(reading.dtype)), None
        weights = torch.vmap(lambda one: reference.scatter(one, layout.positions(), layout.shape))
        return weights(values.movedim(in_dims[0], 0).to(reading.dtype)), 0


def compress_gradient(gradient: Tensor, layout: Layout) -> Tensor:
    """The kept entries of a gradient: dense, sparse COO (``nn.Embedding``) or of them alone."""
    if isinstance(gradient, SparseWeight):
        if gradient.entries is layout and gradient.is_contiguous():
            return gradient.unchanged()
        gradient = gradient.dense()
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    if transforms_backward(gradient):
        return reference.gather(dense, layout.positions())
    return layout.compress(dense)
