"""Gives a module with sparsely stored parameters a class that reads them as dense-shaped weights.

The module's class is replaced by a subclass in which ``module.weight`` reads as the dense-shaped
weight, while the registered parameter of that name is the 1-D vector of unpruned values. State
dicts stay dense and keep their keys; pickles and deep copies work.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.sparse.ops import convolution, embedding, linear
from lightning_axosparse.sparse.ops.torch_functions import read_weight
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm, master_dtype
from lightning_axosparse.sparse.store.weight import SparseWeight, sparse_weight
from lightning_axosparse.support.torch_internals import observed
from lightning_axosparse.support.troubleshooting import see

_PLAIN = (Tensor, nn.Parameter)


class SparseStorage(NamedTuple):
    """How a parameter is stored sparse: its layout, and the dense form in which it is read."""

    layout: Layout
    form: DenseForm


class SparseModule(nn.Module):
    """Mixin of a module's class while some of its parameters are stored sparse.

    ``_stored`` holds their storage, by attribute; ``_dense_class`` is the module's own class.
    """

    _dense_class: type[nn.Module]
    _stored: dict[str, SparseStorage]

    def __init_subclass__(cls, **_: Any) -> None:
        """Do not call that of the module's class: no new kind of module is defined."""

    def __setattr__(self, name: str, value: Any) -> None:
        stored = vars(self).get("_stored", {}).get(name)
        if isinstance(value, SparseWeight) and value.parameter is self._parameters.get(name, self):
            return  # `self.weight *= mask` has written to it already.
        replaced = stored and getattr(value, "shape", None) != (stored.layout.nnz,)
        if replaced and not isinstance(value, nn.Parameter | None):
            raise self._misuse(f"'{name}' must be another parameter, not {type(value).__name__}")
        super().__setattr__(name, value)
        if replaced:
            forget_layout(self, name)

    def __delattr__(self, name: str) -> None:
        if name in self._stored and not self._may_be_replaced(name):  # as parametrizations do
            raise self._misuse(f"'{name}' cannot be replaced")
        super().__delattr__(name)

    def _may_be_replaced(self, name: str) -> bool:
        """Return whether PEFT's LoRA may parametrize a weight in each call: it is frozen."""
        values = self._parameters[name]
        return values is not None and not values.requires_grad and "forward" not in vars(type(self))

    def _registered(self) -> list[tuple[str, nn.Parameter, SparseStorage]]:
        """Return the sparse weights that are registered here, and not in a parametrization."""
        stored = ((name, self._parameters.get(name), how) for name, how in self._stored.items())
        return [(name, values, how) for name, values, how in stored if values is not None]

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer; a weight that was read from this module is its parameter again."""
        if isinstance(tensor, SparseWeight) and name in self._stored:
            if tensor.parameter is None:  # It has been moved or cast in its parametrization.
                self._stored[name].layout.move(tensor.device)
                self._stored[name].form.move(tensor.dtype)
                self._parameters[name] = nn.Parameter(tensor.stored_values, requires_grad=False)
            else:
                self._parameters[name] = tensor.parameter
        else:
            super().register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter.

        Raises:
            MisconfigurationException: for a weight that was read from this module, as
                ``torch.nn.utils.prune`` registers it; torch's own message would not name the cause.
        """
        if isinstance(param, SparseWeight):
            raise self._misuse(f"a sparse weight cannot become its parameter '{name}'")
        super().register_parameter(name, param)

    def __prepare_scriptable__(self) -> nn.Module:
        raise self._misuse("torch.jit.script cannot compile it; torch.jit.trace can")

    def _misuse(self, problem: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"{_dense_class(self).__name__} is stored sparse ({', '.join(self._stored)}): "
            f"{problem}. Call densify(module) first; to change the values, write into the weight "
            "(in place, or with load_state_dict)." + see("sparse-storage")
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseModule:
        conversion = _MasterConversion(fn, self)
        super()._apply(conversion, recurse)  # type: ignore[no-untyped-call]
        for name, values, (layout, form) in self._registered():
            layout.move(values.device)
            form.move(conversion.dtypes[name])
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, _, (layout, form) in self._registered():
            values = destination[prefix + name]
            destination[prefix + name] = (
                sparse_weight(values, layout, DenseForm(form.dtype))
                if keep_vars
                else layout.densify(values.to(form.dtype))
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        local_metadata, *_, error_msgs = others
        assigned = local_metadata.get("assign_to_params_buffers", False)
        for name, (layout, form) in self._stored.items():
            dense = state_dict.get(prefix + name)
            if dense is None:
                continue
            if dense.shape == layout.shape:
                values = layout.to(dense.device).compress(dense)
                _warn_of_dropped(prefix + name, dense, values)
                if assigned:  # The tensor replaces the parameter: its device and dtype are kept.
                    layout.move(dense.device)
                    form.move(dense.dtype)
                    values = values.to(master_dtype(dense.dtype))
                state_dict[prefix + name] = values
            else:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: the sparse parameter takes a dense tensor "
                    f"of shape {tuple(layout.shape)}, the checkpoint has {tuple(dense.shape)}."
                )
                state_dict[prefix + name] = self._parameters[name]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists only in this process: pickle the arguments that create it.
        reduced: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        return _new_module, (_dense_class(self), tuple(self._stored)), *reduced[2:]


def _warn_of_dropped(name: str, dense: Tensor, unpruned: Tensor) -> None:
    if not dense.is_meta and unpruned.count_nonzero() < dense.count_nonzero():
        warnings.warn(
            f"Entries that are loaded into {name!r} are dropped, because it is stored sparse "
            "without them. To load all, call densify(module) first." + see("sparse-storage"),
            stacklevel=2,
        )


class SparseRNN(SparseModule):
    """Mixin for LSTM, GRU and RNN, which store a list of their weights between calls.

    The list is built at each read: a stored list could not be copied or pickled. cuDNN's single
    flat buffer does not exist for weights that are materialized at every use.
    """

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]  # type: ignore[union-attr]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Tensor]) -> None:
        pass

    def _weights_have_changed(self) -> bool:
        return False

    def flatten_parameters(self) -> None:
        """Do nothing, as there are no dense weights to flatten."""


class SparseEmbedding(SparseModule):
    """Mixin for Embedding and EmbeddingBag: the gradient of the unpruned values is a dense vector.

    ``DistributedDataParallel`` reads ``sparse`` before it builds its buckets, to learn whether the
    gradient will be a sparse tensor.
    """

    @property
    def sparse(self) -> bool:
        """False while stored sparse; the module's own setting returns when it is dense again."""
        return False

    @sparse.setter
    def sparse(self, sparse: bool) -> None:
        vars(self)["sparse"] = sparse


class _MasterConversion:
    """Wraps the function that ``Module._apply`` gets so that unpruned values stay at least float32.

    Attributes:
        dtypes: the dtypes to which the function converts the module's dense-shaped weights.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], module: SparseModule) -> None:
        self._fn = fn
        self.dtypes: dict[str, torch.dtype] = {}
        self._masters: dict[int, torch.dtype] = {}
        for name, values, (_, form) in module._registered():
            sample = torch.empty(0, dtype=form.dtype, device=values.device)
            self.dtypes[name] = fn(sample).dtype
            for tensor in (values, values.grad):
                self._masters[id(tensor)] = master_dtype(self.dtypes[name])

    def __call__(self, tensor: Tensor) -> Tensor:
        converted, master = self._fn(tensor), self._masters.get(id(tensor))
        if master in (None, converted.dtype):
            return converted
        return tensor.to(converted.device, master)


def make_sparse(module: nn.Module, name: str, layout: Layout, form: DenseForm) -> None:
    """Make ``module.name`` read as a dense-shaped weight whose values have this ``layout``."""
    dense_class = _dense_class(module)
    stored = {**vars(module).get("_stored", {}), name: SparseStorage(layout, form)}
    vars(module)["_stored"] = stored
    vars(module).pop("_flat_weights", None)
    module.__class__ = _sparse_class(dense_class, tuple(stored))


def validate_class(module: nn.Module) -> None:
    """Check that the class of a sparsely stored module has not been replaced.

    Raises:
        MisconfigurationException: if it was parametrized.
    """
    if isinstance(module, SparseModule) and "_dense_class" not in vars(type(module)):
        raise MisconfigurationException(
            f"{_dense_class(module).__name__} was parametrized while it was stored sparse "
            f"({', '.join(module._stored)}). Call torch.nn.utils.parametrize."
            "remove_parametrizations first, then densify(module)." + see("sparse-storage")
        )


def forget_layout(module: nn.Module, name: str) -> None:
    """Make ``module.name`` read as the parameter itself; other sparse parameters stay sparse."""
    validate_class(module)
    stored = {key: value for key, value in vars(module)["_stored"].items() if key != name}
    if stored:
        vars(module)["_stored"] = stored
        module.__class__ = _sparse_class(_dense_class(module), tuple(stored))
        return
    module.__class__ = _dense_class(module)
    del vars(module)["_stored"]
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def _dense_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` while none of its parameters is stored sparse."""
    return module._dense_class if isinstance(module, SparseModule) else type(module)


# One class for the process, so that modules of one class stay of one class when stored sparse.
_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[SparseModule]] = {}


def _sparse_class(dense_class: type[nn.Module], names: tuple[str, ...]) -> type[SparseModule]:
    """Return the subclass of ``dense_class`` in which ``names`` read as dense-shaped weights."""
    key = (dense_class, names)
    if key not in _classes:
        _classes[key] = _new_class(dense_class, names)
    return _classes[key]


def _new_class(dense_class: type[nn.Module], names: tuple[str, ...]) -> type[SparseModule]:
    mixin = SparseModule
    if issubclass(dense_class, nn.RNNBase):
        mixin = SparseRNN
    elif issubclass(dense_class, nn.Embedding | nn.EmbeddingBag) and "weight" in names:
        mixin = SparseEmbedding
    body: dict[str, Any] = {name: property(_reader(name)) for name in names}
    if names == ("weight",) and (compute := _product_on_values(dense_class)) is not None:
        body["forward"] = _forward(dense_class, compute)
    body["_dense_class"] = dense_class
    body["__module__"] = dense_class.__module__
    body["__doc__"] = f"{dense_class.__name__} with {', '.join(names)} stored sparse."
    kind = _before(mixin, dense_class)
    made: type[SparseModule] = kind(f"Sparse{dense_class.__name__}", (dense_class,), body)
    return made


def _before(mixin: type[SparseModule], dense_class: type[nn.Module]) -> Any:
    """Return a metaclass that puts a mixin before the only base of the class that it makes.

    An object can get the new class only if its memory has the layout of the old one. It has where
    the old one is the first base; a mixin before an abstract class would give it another.
    """

    def mro(made: type) -> list[type]:
        order = type.mro(made)
        if dense_class not in made.__bases__:  # A subclass, such as parametrizations make.
            return order
        return [made, *(each for each in mixin.__mro__ if each not in order), *order[1:]]

    return type(f"Sparse{type(dense_class).__name__}", (type(dense_class),), {"mro": mro})


_Compute = Callable[[Any, Tensor, Tensor, Layout, DenseForm], Tensor | None]


def _product_on_values(dense_class: type[nn.Module]) -> _Compute | None:
    """Return what computes a layer on unpruned values; None for layers that read their weight."""
    if dense_class.forward is nn.Embedding.forward:
        return embedding.look_up_rows
    by_rows = linear.rows_are_outputs(dense_class)
    if by_rows is not None:
        return partial(linear.multiply_layer, by_rows)
    return convolution.convolve_layer if convolution.can_convolve(dense_class) else None


def _forward(dense_class: type[nn.Module], compute: _Compute) -> Callable[..., Tensor]:
    dense_forward: Callable[..., Tensor] = dense_class.forward
    _, argument = inspect.signature(dense_forward).parameters

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        inputs: Any = args[0] if args else kwargs.get(argument)
        # A caller may hold the bound forward for longer than the weight is stored sparse, and
        # torch.func.functional_call may put a dense tensor in its place.
        stored, values = vars(layer).get("_stored", {}).get("weight"), layer._parameters["weight"]
        if not stored or type(values) not in _PLAIN or values.shape != (stored.layout.nnz,):
            return dense_forward(layer, *args, **kwargs)
        # A node of autograd would hide from the mode what is computed from what.
        if len(args) + len(kwargs) != 1 or observed():
            return dense_forward(layer, *args, **kwargs)
        form = stored.form.for_values(values, layer.training)
        outputs = compute(layer, inputs, values, stored.layout, form)
        return dense_forward(layer, *args, **kwargs) if outputs is None else outputs

    return forward


def _reader(name: str) -> Callable[[SparseModule], Tensor | None]:
    def read_parameter(module: SparseModule) -> Tensor | None:
        if name not in module._parameters:
            module.__getattr__(name)  # raises torch's AttributeError
        values, (layout, form) = module._parameters[name], module._stored[name]
        # torch.func.functional_call may have put a dense tensor in the parameter's place.
        if values is None or values.shape != torch.Size([layout.nnz]):
            return values
        weight = read_weight(values, layout, form.for_values(values, module.training))
        if isinstance(weight, SparseWeight) and isinstance(values, nn.Parameter):
            weight.parameter = values
        return weight

    return read_parameter


def _new_module(dense_class: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    sparse_class = _sparse_class(dense_class, names)
    return sparse_class.__new__(sparse_class)
