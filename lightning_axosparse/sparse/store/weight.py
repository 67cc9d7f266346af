"""Defines the tensor that has a weight's dense shape and stores only its unpruned entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.sparse.backend import AUTO, Backend
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.store.copies import DenseCopy
from lightning_axosparse.sparse.store.layout import Layout, check_unchanged, row_length
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.support.torch_internals import (
    apply_untransformed,
    backward_transformed,
    forward_mode,
    mutated_tensors,
    no_torch_function,
    transformed,
    version_of,
)
from lightning_axosparse.support.troubleshooting import see

_to_copy = torch.ops.aten._to_copy.default
_add = torch.ops.aten.add.Tensor

_tensors: Any = Tensor
"""``Tensor`` as Any, because the type stubs do not know its descriptors."""


@dataclass(slots=True)
class _Read:
    """One read of a weight, shared by all its views: the values' version, how products run."""

    version: int
    backend: Backend = AUTO


class SparseWeight(Tensor):
    """A tensor of a weight's dense shape that is materialized only in the operator that uses it.

    Views and casts of it stay sparse. Any other operator gets a dense copy that is freed after it,
    or the resident copy, so autograd saves this small object for backward and never a dense weight.
    An in-place operator changes the unpruned entries; writes to pruned entries are dropped. The
    class also represents a gradient of which only the unpruned entries were computed.

    A module returns a new SparseWeight at every read of ``module.weight``. Code for dense modules
    treats ``module.weight`` as a leaf of autograd: it reads and clears ``.grad``, sets
    ``requires_grad`` or ``.data``, and registers hooks. Those are passed to ``parameter``.

    Attributes:
        stored_values: unpruned values, shape ``(nnz,)``; they share storage with the parameter, and
            may have a wider dtype than the weight.
        sparse_layout: the layout of the tensor that this one is a view of.
        parameter: the parameter that this weight was read from; None for views, casts and
            gradients.
        source: the values that it was created from, with their autograd history; None likewise.
    """

    stored_values: Tensor
    sparse_layout: Layout
    parameter: nn.Parameter | None
    source: Tensor | None
    _dense_copy: DenseCopy | None
    _read: _Read

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        layout: Layout,
        geometry: Tensor | None = None,
        dense_copy: DenseCopy | None = None,
        dtype: torch.dtype | None = None,
    ) -> SparseWeight:
        """Wrap ``values``; size, strides, offset and dtype are those of ``geometry``, if any."""
        size: torch.Size = layout.shape
        options: dict[str, Any] = {"dtype": dtype or values.dtype, "device": values.device}
        if geometry is not None:
            size, options["dtype"] = geometry.size(), geometry.dtype
            options["strides"] = geometry.stride()
            options["storage_offset"] = geometry.storage_offset()
        weight: SparseWeight = torch.Tensor._make_wrapper_subclass(cls, size, **options)
        weight.stored_values = values
        weight.sparse_layout = layout
        weight.parameter = weight.source = None
        weight._dense_copy = dense_copy
        weight._read = _Read(version_of(values))
        return weight

    __torch_function__ = no_torch_function

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
            if func.overloadpacket is torch.ops.aten.to:  # In inference mode it arrives as it is.
                return func.decompose(*args, **kwargs)
            # Casts in backward pass the layout, too.
            if func is _to_copy and kwargs.get("layout", torch.strided) is torch.strided:
                options = {key: value for key, value in kwargs.items() if key != "layout"}
                if options.keys() <= {"dtype", "device", "non_blocking"}:
                    return source._converted(**options)
            if func.is_view:
                views = func(source._geometry(), *args[1:], **kwargs)
                first = views if isinstance(views, Tensor) else views[0]
                if first.dtype == source.dtype:
                    return _replace_tensors(source._viewed, views, Tensor)
            if func is _add and len(args) == 2 and not kwargs and source._same_entries(args[1]):
                return source._with(source.unpruned_values() + args[1].unpruned_values())
        mutated = [t for t in mutated_tensors(func, args, kwargs) if isinstance(t, SparseWeight)]
        if mutated:
            return _write_through(func, args, kwargs, mutated)
        # A view must not alias the resident copy, which is written again.
        operand = SparseWeight.dense if func.is_view else SparseWeight.operand
        dense_args = _replace_tensors(operand, args, SparseWeight)
        dense_kwargs = {k: _replace_tensors(operand, v, SparseWeight) for k, v in kwargs.items()}
        return func(*dense_args, **dense_kwargs)

    def unpruned_values(self) -> Tensor:
        """Return the unpruned values in the weight's dtype.

        Raises:
            RuntimeError: if they changed in place since this weight was read.
        """
        self.check_unchanged()
        return self.stored_values.to(self.dtype)

    def dense(self) -> Tensor:
        """Return a new plain tensor with this weight's entries, shape and strides.

        Raises:
            RuntimeError: if the unpruned values changed in place since this weight was read.
        """
        return self._strided(self._dense_base())

    def operand(self) -> Tensor:
        """Return a plain tensor to compute with at once, which may be the resident copy.

        Raises:
            RuntimeError: as :meth:`dense`.
        """
        if self.dense_copy is None:
            return self.dense()
        self.check_unchanged()
        return self._strided(self.dense_copy.filled(self.stored_values, self.sparse_layout))

    @property
    def dense_copy(self) -> DenseCopy | None:
        """The resident dense copy, if there is one of this weight's dtype."""
        copy = self._dense_copy
        return copy if copy is not None and copy.dtype == self.dtype else None

    @property
    def backend(self) -> Backend:
        """Whether products use the unpruned values, a dense weight, or the faster of these."""
        return self._read.backend

    def check_unchanged(self) -> None:
        """Check that the unpruned values are still those that were read.

        Raises:
            RuntimeError: if they changed in place since then.
        """
        check_unchanged(self.stored_values, self._read.version, self.sparse_layout)

    def has_whole_rows(self) -> bool:
        """Return whether this is a matrix of whole rows of the stored tensor, in their order."""
        if self.source is not None:
            return len(self.sparse_layout.shape) == 2
        rows = self.sparse_layout.shape[:1].numel()
        columns = row_length(self.sparse_layout.shape)
        return (
            self.size() == (rows, columns)
            and self.stride() == (columns, 1)
            and self.storage_offset() == 0
        )

    @property
    def grad(self) -> Tensor | None:
        """The parameter's gradient, with the dense shape; writes to it reach the parameter's."""
        if self.parameter is None or self.retains_grad:
            retained: Tensor | None = _tensors.grad.__get__(self)
            return retained
        gradient = self.parameter.grad
        return None if gradient is None else self._with(gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.parameter is None or self.retains_grad:
            _tensors.grad.__set__(self, gradient)
        else:
            if gradient is not None:
                gradient = self.sparse_layout.compress(gradient).to(self.parameter.dtype)
            self.parameter.grad = gradient

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        if self.parameter is None:
            return bool(_tensors.requires_grad.__get__(self))
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Train the parameter, or freeze it, from the next read on."""
        if self.parameter is None:
            return super().requires_grad_(requires_grad)
        self.parameter.requires_grad_(requires_grad)
        return self

    @property
    def data(self) -> Tensor:
        """This tensor without its autograd history; autograd does not see writes to it."""
        detached = self.detach()
        assert isinstance(detached, SparseWeight)
        detached.stored_values = self.stored_values.data
        detached._read = _Read(version_of(detached.stored_values), self.backend)
        return detached

    @data.setter
    def data(self, data: Tensor) -> None:
        if data.shape != self.shape:
            raise ValueError(
                f"A weight that is stored sparse keeps its shape {tuple(self.shape)}; got data of "
                f"shape {tuple(data.shape)}. Call densify(module) first." + see("sparse-storage")
            )
        self.data.copy_(data)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Do nothing for the weight itself, as parametrizations give it; else as torch does."""
        return self if source is self else _tensors.set_(self, source, *args, **kwargs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with each new gradient, of the dense shape, before it is accumulated.

        Returns:
            A handle with a method ``remove()``.
        """
        if self.parameter is None:
            return _tensors.register_hook(self, hook)

        def compressed(gradient: Tensor) -> Tensor | None:
            positions = self.sparse_layout.positions()
            changed = hook(reference.scatter(gradient, positions, self.sparse_layout.shape))
            return None if changed is None else reference.gather(changed, positions)

        return _tensors.register_hook(self.parameter, compressed)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with the parameter, the vector of unpruned values, after accumulation.

        Returns:
            A handle with a method ``remove()``.
        """
        if self.parameter is None:
            return _tensors.register_post_accumulate_grad_hook(self, hook)
        return _tensors.register_post_accumulate_grad_hook(self.parameter, hook)

    def tolist(self) -> Any:
        """Return the entries as nested lists."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the entries as a dense NumPy array."""
        return self.dense().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.dense(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"SparseWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"nnz={self.sparse_layout.nnz} of {self.sparse_layout.shape.numel()})"
        )

    def _dense_base(self) -> Tensor:
        """Return the dense tensor of the layout's shape that this weight is a view of."""
        return self.sparse_layout.densify(self.unpruned_values())

    def _strided(self, base: Tensor) -> Tensor:
        return base.as_strided(self.size(), self.stride(), self.storage_offset())

    def _geometry(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        return self._strided(torch.empty(self.sparse_layout.shape, dtype=dtype, device="meta"))

    def _viewed(self, geometry: Tensor) -> SparseWeight:
        view = type(self)(self.stored_values, self.sparse_layout, geometry, self._dense_copy)
        view._read = self._read
        return view

    def _with(self, values: Tensor) -> SparseWeight:
        return type(self)(values, self.sparse_layout, self._geometry())

    def _same_entries(self, other: Any) -> bool:
        """Return whether the sum with ``other`` has the same layout as both."""
        return (
            isinstance(other, SparseWeight)
            and other.sparse_layout is self.sparse_layout
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
        in_dtype = self.stored_values.dtype == self.dtype
        if self._dense_copy is not None and device == self.device and in_dtype:
            # The resident copy casts the values when it is filled.
            return self._viewed(self._geometry(dtype))
        values = self.unpruned_values().to(device, dtype, non_blocking=non_blocking, copy=True)
        converted = type(self)(values, self.sparse_layout.to(device), self._geometry(dtype))
        converted._read.backend = self.backend
        return converted


def sparse_weight(
    values: Tensor,
    layout: Layout,
    form: DenseForm | None = None,
    kind: type[SparseWeight] = SparseWeight,
) -> Tensor:
    """Return the dense-shaped weight whose unpruned entries are ``values``, differentiable in them.

    Its gradient is compressed to the unpruned entries as soon as it is complete. torch.compile
    cannot trace a tensor subclass into its operators: it gets a dense tensor, which the backward
    pass materializes again, so that it is not saved either. Forward-mode differentiation and
    ``torch.jit.trace`` get a plain dense tensor.

    Args:
        values: unpruned values, shape ``(layout.nnz,)``, floating.
        layout: the positions of the values.
        form: the weight's dtype and resident copy; None: the dtype of ``values`` and no copy.
        kind: the class of the weight.
    """
    form = form or DenseForm(values.dtype)

    def scattered(values: Tensor) -> Tensor:
        return reference.scatter(values, layout.positions(), layout.shape)

    if torch.compiler.is_compiling():
        dense: Tensor = checkpoint(scattered, values.to(form.dtype), use_reentrant=False)
        return dense
    if forward_mode():
        return scattered(values.to(form.dtype))
    arguments = values, layout, form, kind
    weight: SparseWeight
    if transformed():
        weight = _Expand.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        weight = apply_untransformed(_Expand, *arguments)
    weight.source = values
    return weight


class _Expand(torch.autograd.Function):
    """The sparse weight as a function of its unpruned values."""

    @staticmethod
    def forward(
        values: Tensor, layout: Layout, form: DenseForm, kind: type[SparseWeight]
    ) -> SparseWeight:
        weight = kind(values.detach(), layout, dense_copy=form.copy, dtype=form.dtype)
        weight._read.backend = form.backend
        return weight

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
        form: DenseForm,
        kind: type[SparseWeight],
    ) -> tuple[Tensor, int | None]:
        """Stay sparse for one set of values; materialize several sets together."""
        if in_dims[0] is None:
            return sparse_weight(
                values, layout, DenseForm(form.dtype, backend=form.backend), kind
            ), None
        weights = torch.vmap(lambda v: reference.scatter(v, layout.positions(), layout.shape))
        return weights(values.movedim(in_dims[0], 0).to(form.dtype)), 0


def compress_gradient(gradient: Tensor, layout: Layout) -> Tensor:
    """Return the unpruned entries of a gradient: dense, COO (``nn.Embedding``) or SparseWeight."""
    if isinstance(gradient, SparseWeight):
        if gradient.sparse_layout is layout and gradient.is_contiguous():
            return gradient.unpruned_values()
        gradient = gradient.dense()
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    if backward_transformed(gradient):
        return reference.gather(dense, layout.positions())
    return layout.compress(dense)


def _write_through(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mutated: Sequence[SparseWeight],
) -> Any:
    """Run an in-place operator on dense copies, and store their unpruned entries."""
    bases = {id(weight): weight._dense_base() for weight in mutated}
    copies = {id(weight): weight._strided(bases[id(weight)]) for weight in mutated}

    def dense(weight: SparseWeight) -> Tensor:
        return copies[id(weight)] if id(weight) in copies else weight.dense()

    dense_kwargs = {k: _replace_tensors(dense, v, SparseWeight) for k, v in kwargs.items()}
    result = func(*_replace_tensors(dense, args, SparseWeight), **dense_kwargs)
    for weight in mutated:
        weight.stored_values.copy_(weight.sparse_layout.compress(bases[id(weight)]))
        # Operators that run inside dispatch count no version.
        if not weight.stored_values.is_inference():
            increment_version(weight.stored_values)
        weight._read.version = version_of(weight.stored_values)
        if weight._dense_copy is not None:
            weight._dense_copy.invalidate()
    originals = {id(copies[id(weight)]): weight for weight in mutated}
    return _replace_tensors(lambda tensor: originals.get(id(tensor), tensor), result, Tensor)


def _replace_tensors(function: Callable[[Any], Any], value: Any, kind: type[Tensor]) -> Any:
    """Replace every ``kind`` in an operator's arguments or result; faster than a pytree map."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_replace_tensors(function, item, kind) for item in value)
    return value
