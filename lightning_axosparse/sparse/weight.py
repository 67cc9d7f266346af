"""Weight: a tensor with the dense shape that holds only its kept entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_axosparse.sparse.compiled import recomputed_densify
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.layout import CooLayout

_to_copy = torch.ops.aten._to_copy.default


def sparse_weight(values: Tensor, layout: CooLayout) -> Tensor:
    """The dense-shaped weight whose kept entries are ``values``, differentiable in ``values``.

    Its gradient is compressed to the kept entries as soon as it is complete. While torch.compile
    traces, which cannot follow a wrapper into its operators, it is a dense tensor that the backward
    pass makes again, so none is saved there either.

    Args:
        values: kept entries, shape ``(layout.nnz,)``, floating.
        layout: where they lie.
    """
    if torch.compiler.is_compiling():
        return recomputed_densify(values, layout.indices, layout.shape)
    weight: Tensor = _Expand.apply(values, layout)  # type: ignore[no-untyped-call]
    return weight


class SparseWeight(Tensor):
    """A dense-shaped tensor that is made dense only inside the operator that uses it.

    Views and casts of it stay sparse. Any other operator is given a dense copy that dies with it,
    so what autograd saves for backward is this small object and never a dense weight. An in-place
    operator writes through to the kept entries; what it writes elsewhere is dropped.

    Attributes:
        kept: kept entries, shape ``(nnz,)``; shares storage with the parameter.
        entries: their places in the tensor that this one is a view of.
    """

    kept: Tensor
    entries: CooLayout
    _version_read: int

    @staticmethod
    def __new__(
        cls, values: Tensor, layout: CooLayout, geometry: Tensor | None = None
    ) -> SparseWeight:
        """Wrap ``values``; size, strides and offset are those of ``geometry``, if given."""
        if geometry is None:
            geometry = torch.empty(layout.shape, device="meta")
        weight: SparseWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            geometry.size(),
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        weight.kept = values
        weight.entries = layout
        weight._version_read = values._version
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
            if func is _to_copy and kwargs.keys() <= {"dtype", "device", "non_blocking"}:
                return source._converted(**kwargs)
            if func.is_view:
                views = func(source._geometry(), *args[1:], **kwargs)
                first = views if isinstance(views, Tensor) else views[0]
                if first.dtype == source.dtype:
                    return _mapped(source._viewed, views, Tensor)
        written = _written_by(func, args, kwargs)
        if written:
            return _write_through(func, args, kwargs, written)
        dense_args = _mapped(SparseWeight.dense, args)
        return func(*dense_args, **{k: _mapped(SparseWeight.dense, v) for k, v in kwargs.items()})

    def dense(self) -> Tensor:
        """A fresh plain tensor with this weight's entries, shape and strides.

        Raises:
            RuntimeError: if the kept values changed in place since this weight was read.
        """
        return self._strided(self._whole())

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

    def _unchanged(self) -> Tensor:
        """The kept values, if they are still those that were read."""
        if self.kept._version != self._version_read:
            raise RuntimeError(
                f"The kept values of a sparse weight of shape {tuple(self.entries.shape)} were "
                "changed in place after the forward pass that read it and before the backward "
                "pass that needs it again. Step the optimizer, load weights or change them only "
                "after backward."
            )
        return self.kept

    def _whole(self) -> Tensor:
        """The dense tensor of the layout's shape, of which this weight is a view."""
        return self.entries.densify(self._unchanged())

    def _strided(self, base: Tensor) -> Tensor:
        return base.as_strided(self.size(), self.stride(), self.storage_offset())

    def _geometry(self) -> Tensor:
        return self._strided(torch.empty(self.entries.shape, dtype=self.dtype, device="meta"))

    def _viewed(self, geometry: Tensor) -> SparseWeight:
        view = SparseWeight(self.kept, self.entries, geometry)
        view._version_read = self._version_read
        return view

    def _converted(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        non_blocking: bool = False,
    ) -> SparseWeight:
        device = device or self.device
        dtype = dtype or self.dtype
        values = self._unchanged().to(device, dtype, non_blocking=non_blocking, copy=True)
        return SparseWeight(values, self.entries.to(device), self._geometry())


class _Expand(torch.autograd.Function):
    """Kept values to lazy weight; backward, dense gradient to gradient of the kept values."""

    @staticmethod
    def forward(values: Tensor, layout: CooLayout) -> SparseWeight:
        return SparseWeight(values.detach(), layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, CooLayout], output: Tensor) -> None:
        ctx.layout = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return compress_gradient(gradient, ctx.layout), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None], values: Tensor, layout: CooLayout
    ) -> tuple[Tensor, int | None]:
        """Stay lazy for one set of values under vmap; make several sets dense together."""
        if in_dims[0] is None:
            return sparse_weight(values, layout), None
        weights = torch.vmap(lambda one: reference.densify(one, layout.indices, layout.shape))
        return weights(values.movedim(in_dims[0], 0)), 0


def compress_gradient(gradient: Tensor, layout: CooLayout) -> Tensor:
    """The kept entries of a gradient, dense or (``nn.Embedding(sparse=True)``) sparse COO."""
    return layout.compress(gradient.to_dense() if gradient.is_sparse else gradient)


def _mapped(function: Callable[[Any], Any], value: Any, kind: type[Tensor] = SparseWeight) -> Any:
    """Replace every ``kind`` in an operator's arguments or result; cheaper than a pytree map."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, item, kind) for item in value)
    return value


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[SparseWeight]:
    """The sparse weights among the arguments that ``func`` changes in place."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    changed = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, SparseWeight)]


def _write_through(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    written: Sequence[SparseWeight],
) -> Any:
    """Run an in-place operator on dense copies and keep what it wrote to the kept entries."""
    bases = {id(weight): weight._whole() for weight in written}
    copies = {id(weight): weight._strided(bases[id(weight)]) for weight in written}

    def dense(weight: SparseWeight) -> Tensor:
        return copies[id(weight)] if id(weight) in copies else weight.dense()

    result = func(*_mapped(dense, args), **{k: _mapped(dense, v) for k, v in kwargs.items()})
    for weight in written:
        weight.kept.copy_(weight.entries.compress(bases[id(weight)]))
        weight._version_read = weight.kept._version
    originals = {id(copies[id(weight)]): weight for weight in written}
    return _mapped(lambda tensor: originals.get(id(tensor), tensor), result, Tensor)
