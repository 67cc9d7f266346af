"""Converts a module's parameters to sparse storage and back, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_axosparse.sparse.backend import COMPUTES, Backend, Compute
from lightning_axosparse.sparse.module.optimizer_state import (
    convert_parameter,
    validate_elementwise_optimizers,
    validate_state,
)
from lightning_axosparse.sparse.module.parameters import (
    OwnedParameter,
    owned_parameters,
    sparse_parameters,
    validate_not_deferred,
)
from lightning_axosparse.sparse.module.sparse_module import (
    forget_layout,
    validate_class,
)
from lightning_axosparse.sparse.ops import convolution, embedding
from lightning_axosparse.sparse.ops import products as sparse_products
from lightning_axosparse.sparse.ops.measure import measured_processor
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout, is_stack
from lightning_axosparse.sparse.store.materialize import DenseForm, master_dtype
from lightning_axosparse.support.arguments import (
    MASKS,
    MODULE,
    NONE,
    OPTIMIZER,
    checked,
    one_of,
    validate_mask,
)
from lightning_axosparse.support.memory import release_freed_memory
from lightning_axosparse.support.torch_internals import is_compiled
from lightning_axosparse.support.troubleshooting import see


@checked(
    ValueError,
    module=MODULE,
    masks=MASKS,
    optimizer=OPTIMIZER | NONE,
    compute=one_of(*COMPUTES),
)
def sparsify(
    module: nn.Module,
    masks: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    compute: Compute = "auto",
) -> None:
    """Store only the unpruned values of the named parameters of ``module``, in place.

    The parameter objects, their names and the optimizer's parameter groups stay the same. A pruned
    parameter becomes the 1-D vector of its unpruned values, so its gradient and its optimizer state
    shrink with it. ``module.weight`` still reads as a tensor of the dense shape. State dicts stay
    dense; each call copies them: to change the values, use ``load_state_dict``, the parameters or
    ``module.weight``. The method follows SAMO (Singh & Bhatele, IPDPS 2023) and stores the weight
    itself sparse as well.

    Args:
        module: the model, or any part of it. If it is wrapped in ``DistributedDataParallel``, pass
            the wrapper, which then reduces only the unpruned entries.
        masks: parameter name, as in ``module.named_parameters()`` -> bool tensor of the parameter's
            shape, False where an entry is pruned. A tied parameter may be given under any of its
            names. The mask of a parameter that is stored sparse already may prune more of its
            entries, as a ratio that rises does.
        optimizer: the optimizer that holds the parameters, if there is one; its state of them is
            compressed.
        compute: how linear layers and, in float32, convolutions run. On CPU, for weights that were
            made sparse there: "sparse": with the unpruned values; "dense": with a dense weight,
            materialized in parts at every use; "auto": as is faster for the density and, in 16
            bits, on this processor (``sparse/ops/products.py``, ``sparse/ops/convolution.py``).
            Everywhere "samo": with a dense copy that stays in memory, in the dtype that products
            run in, and is filled once per optimizer step. Sums run in another order than in dense
            products, so results differ in their last bits. In 16 bits products with the unpruned
            values run in float32, and are rounded. The unpruned values of a weight of less than 32
            bits are float32.

    Raises:
        ValueError: for an argument of another type, a name, shape or dtype that does not fit, a
            parameter or a mask on the meta device, a mask that keeps entries that are pruned
            already, and optimizer state that is not elementwise. Nothing has changed then.
        MisconfigurationException: for an optimizer that updates a matrix otherwise than the vector
            of its entries. Nothing has changed then, either.
    """
    owned = owned_parameters(module)
    by_name = {name: entry for entry in owned for name in entry.names}
    layouts: dict[int, tuple[OwnedParameter, Layout]] = {}
    for name, mask in masks.items():
        if name not in by_name:
            close = get_close_matches(str(name), by_name, n=3, cutoff=0.4) or list(by_name)[:5]
            raise ValueError(
                f"The module has no parameter '{name}' to make sparse. Close: {', '.join(close)}."
                + see("sparse-storage")
            )
        entry = by_name[name]
        layout = _checked_layout(name, entry, mask)
        _, known = layouts.setdefault(id(entry.parameter), (entry, layout))
        if not known.same_entries(layout):
            raise ValueError(
                f"'{entry.names[0]}' and '{name}' are one tied parameter, but their masks differ. "
                "Give one mask." + see("sparse-storage")
            )
        if optimizer is not None and entry.layout is None:
            validate_state(name, optimizer.state.get(entry.parameter, {}), entry.parameter.shape)
    if optimizer is not None:
        validate_elementwise_optimizers(optimizer)
    optimizers = [] if optimizer is None else [optimizer]
    for entry, layout in layouts.values():
        if entry.layout is None:
            _to_sparse(entry, layout, optimizers)
        elif entry.layout.nnz > layout.nnz:
            _prune_further(entry, layout, optimizers)
        assert entry.form is not None
        chooses = compute == "auto" and entry.parameter.is_cpu
        measured = measured_processor() if chooses else None
        entry.form.compute_by(Backend(compute, measured))
    renew_reducers(module)
    load_loops_of(module)
    _warn_of_compiled_layers(module)
    release_freed_memory()


@checked(ValueError, module=MODULE, optimizer=OPTIMIZER | NONE)
def densify(module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Make every sparsely stored parameter of ``module`` dense again, in place.

    The inverse of :func:`sparsify`. Pruned entries are zero in weights, gradients and optimizer
    state.

    Args:
        module: the model, or any part of it.
        optimizer: the optimizer that holds the parameters, if there is one.

    Raises:
        ValueError: for an argument of another type.
        MisconfigurationException: if a layer was parametrized while it was stored sparse.
    """
    for submodule in module.modules():
        validate_class(submodule)
    for entry in owned_parameters(module):
        if entry.layout is not None:
            _to_dense(entry, [] if optimizer is None else [optimizer])
    renew_reducers(module)


def densify_for(
    module: nn.Module, state: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> None:
    """Make those parameters dense of which a state dict to be loaded has pruned entries.

    Loading a checkpoint from before the ticket into sparse parameters would drop these entries.
    """
    for entry in sparse_parameters(module).values():
        dense = next((state[name] for name in entry.names if name in state), None)
        if entry.parameter.is_meta or dense is None or dense.shape != entry.shape:
            continue
        assert entry.layout is not None
        unpruned = entry.layout.to(dense.device).compress(dense)
        if unpruned.count_nonzero() < dense.count_nonzero():
            _to_dense(entry, optimizers)


def _checked_layout(name: str, entry: OwnedParameter, mask: Tensor) -> Layout:
    parameter, present, shape = entry.parameter, entry.layout, entry.shape
    validate_mask(name, mask)
    if mask.shape != shape:
        raise ValueError(
            f"The mask of '{name}' has shape {tuple(mask.shape)}, the parameter {tuple(shape)}."
            + see("sparse-storage")
        )
    validate_not_deferred(name, parameter)
    if parameter.is_meta:
        raise ValueError(
            f"'{name}' is on the meta device: this process does not hold its values."
            + see("sparse-storage")
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"'{name}' is of {parameter.dtype}; only floating parameters are pruned."
            + see("sparse-storage")
        )
    layout = layout_of(mask.to(parameter.device))
    if present is not None and int(present.compress(layout.mask()).sum()) < layout.nnz:
        raise ValueError(
            f"The mask of '{name}' keeps entries that are pruned already ({present.nnz} of "
            f"{shape.numel()} are kept). Call densify(module) first." + see("sparse-storage")
        )
    return layout


def _to_sparse(entry: OwnedParameter, layout: Layout, optimizers: Sequence[Optimizer]) -> None:
    form = DenseForm(entry.parameter.dtype)

    def compressed(value: Tensor) -> Tensor:
        dense = value.to_dense() if value.is_sparse else value  # the gradient of an embedding
        return layout.to(value.device).compress(dense).to(master_dtype(form.dtype))

    convert_parameter(entry.parameter, optimizers, compressed)
    entry.read_as(layout, form)


def _prune_further(entry: OwnedParameter, layout: Layout, optimizers: Sequence[Optimizer]) -> None:
    """Prune more entries of a parameter that is stored sparse."""
    assert entry.stored is not None
    before, form = entry.stored
    mask = before.compress(layout.mask())
    convert_parameter(entry.parameter, optimizers, lambda values: values[mask.to(values.device)])
    entry.read_as(layout, DenseForm(form.dtype))


def _to_dense(entry: OwnedParameter, optimizers: Sequence[Optimizer]) -> None:
    assert entry.stored is not None
    layout, form = entry.stored

    def dense(values: Tensor) -> Tensor:
        return layout.to(values.device).densify(values.to(form.dtype))

    convert_parameter(entry.parameter, optimizers, dense)
    for owner, attribute in entry.owners:
        forget_layout(owner, attribute)


def renew_reducers(module: nn.Module) -> None:
    """Make each ``DistributedDataParallel`` build new buckets, as it does when unpickled."""
    for submodule in module.modules():
        if isinstance(submodule, DistributedDataParallel):
            submodule.__setstate__(submodule.__getstate__())


def load_loops_of(module: nn.Module) -> None:
    """Load the loops with which layers of ``module`` will multiply, convolve and look up."""
    needed = {load for entry in sparse_parameters(module).values() for load in _loops_of(entry)}
    if not needed:
        return
    # numba takes a second to import, and only products on unpruned values need it.
    from lightning_axosparse.support.compilation import compilation

    with compilation():
        for load in needed:
            load()


def _warn_of_compiled_layers(module: nn.Module) -> None:
    """Warn that layers do not use the loops which :func:`load_loops_of` loads for them."""
    for name, part in module.named_modules():
        entries = sparse_parameters(part).values() if is_compiled(part) else ()
        if any(True for entry in entries for _ in _loops_of(entry)):
            warnings.warn(
                f"{name or 'The module'!r} is compiled: on a CPU, compiled code makes its sparse "
                "weights dense at each use, which takes longer than without `compile()`."
                + see("sparse-storage"),
                stacklevel=2,
            )
            return


def _loops_of(entry: OwnedParameter) -> Iterator[Callable[[], None]]:
    """Yield the functions that load the loops that a sparse parameter needs."""
    assert entry.stored is not None
    layout, form = entry.stored
    if form.copy is not None:
        return
    choice = form.backend, entry.parameter.new_empty(0, dtype=form.dtype)
    owners = [owner for owner, _ in entry.owners]
    if any(isinstance(owner, nn.Conv1d | nn.Conv2d) for owner in owners):
        if convolution.should_run(layout, *choice):
            yield convolution.load_loops
    elif len(layout.shape) == 2 or is_stack(layout.shape):
        # At any density: a pruning ratio may rise, and the first rank announces the compilation
        # that all ranks wait for only if it compiles, too.
        if sparse_products.should_run(layout, "one_token", *choice):
            yield sparse_products.load_loops
        is_embedding = any(isinstance(owner, nn.Embedding) for owner in owners)
        if is_embedding and sparse_products.can_read(layout, entry.parameter):
            yield embedding.load_loops
