"""Makes and loads only the layers of this rank, so that no rank allocates all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.strategy.stages.sharded_module import in_parts
from lightning_axosparse.support.deferred_init import DeferredInit
from lightning_axosparse.support.torch_internals import swap_values
from lightning_axosparse.support.troubleshooting import see

_META = torch.device("meta")


@contextmanager
def made_without(
    unwanted: Callable[[], Iterable[Tensor]],
    make_first: Callable[[Callable[[Tensor], None]], None] | None = None,
) -> Iterator[None]:
    """Make the tensors of the context at its end, except those that ``unwanted`` returns then.

    They have the values, to the bit, that they would have if all were made at once. The others stay
    on the meta device.

    Args:
        unwanted: returns the others.
        make_first: is given a function that makes one tensor; for those that are to become smaller
            before the next one is made.
    """
    with DeferredInit() as deferred:
        yield
    if make_first is not None:
        make_first(deferred.make)
    deferred.make_except(unwanted())


@contextmanager
def parameters_on_meta(may_share: Callable[[Tensor], bool]) -> Iterator[None]:
    """Move each parameter to the meta device when a module of the context gets it.

    A state dict that is loaded in the context gives parameters their values and memory.

    Args:
        may_share: whether a parameter may have the memory of a tensor of a state dict.

    Raises:
        MisconfigurationException: if the context moves a module whose parameters a state dict, as
            one loaded with ``strict=False``, has given no values.
    """
    loading: dict[nn.Module, RemovableHandle] = {}
    take = partial(_take_values, may_share)

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if module not in loading:
            loading[module] = module.register_load_state_dict_pre_hook(take)
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to(_META), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    except NotImplementedError as error:
        empty = [
            f"{type(module).__name__}.{name} of shape {tuple(parameter.shape)}"
            for module in loading
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        ]
        if not empty or "meta tensor" not in str(error):
            raise
        raise _without_values(empty) from error
    finally:
        hook.remove()
        for handle in loading.values():
            handle.remove()


def _without_values(empty: Sequence[str]) -> MisconfigurationException:
    return MisconfigurationException(
        f"The module has no values for {empty[0]} and {len(empty) - 1} more of its parameters, "
        "which are on the meta device: `trainer.init_module(empty_init=True)` gives them none, and "
        "no checkpoint has. Load a checkpoint of the whole module, or leave out `empty_init`."
        + see("layers")
    )


def _take_values(
    may_share: Callable[[Tensor], bool],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Before a module's own parameters are loaded: give those without memory theirs."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor) or value.is_meta:
            continue
        alike = (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
        if not parameter.is_meta:
            is_shared = alike and value.data_ptr() == parameter.data_ptr()
        elif is_shared := alike and may_share(value):
            swap_values(parameter, value.detach().requires_grad_(parameter.requires_grad))
        else:
            allocate([parameter])
        if is_shared:
            state[prefix + name] = parameter  # which torch does not copy onto itself


def allocate(tensors: Iterable[Tensor]) -> None:
    """Give those of the tensors that are on the meta device memory on CPU, uninitialised."""
    for tensor in tensors:
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)
            swap_values(tensor, empty)


def values_held(
    state: Mapping[str, Any], module: nn.Module, others: Iterable[Tensor] = ()
) -> dict[str, Any]:
    """Return a state dict that loads the same names into ``module``, but reads only what it holds.

    Values for tensors on the meta device are left out of it: they are meta tensors there, too.

    Args:
        state: of the whole module.
        module: the module.
        others: tensors of other stages, which keep the values that they have here until then.
    """
    kept_as_they_are = {id(tensor) for tensor in others}

    def held(value: Any, present: Any) -> Any:
        if not (isinstance(value, Tensor) and isinstance(present, Tensor)):
            return value
        if present.is_meta:
            return torch.empty_like(value, device=_META)
        return present if id(present) in kept_as_they_are else value

    tensors = module.state_dict(keep_vars=True)
    return {name: held(value, tensors.get(name)) for name, value in state.items()}


def load_values(
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    others: Iterable[Tensor] = (),
) -> None:
    """Load what a module holds of a state.

    Args:
        module: the module.
        state: of the whole module; its tensors may be deferred.
        strict: as for ``load_state_dict``.
        others: tensors that keep the values they have.
    """
    with in_parts(module):
        held = values_held(state, module, others)
    module.load_state_dict(held, strict=strict)


def validate_values(tensors: Iterable[tuple[str, Tensor]], stage: int) -> None:
    """Check that the tensors of a stage have values.

    Raises:
        MisconfigurationException: naming those that are on the meta device.
    """
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise MisconfigurationException(
            f"Stage {stage} has no values for {empty[0]!r} and {len(empty) - 1} more of its "
            "tensors, which are on the meta device. If the module was made under "
            "`trainer.init_module(empty_init=True)`, call `load_from_checkpoint` inside of it, "
            "give `ckpt_path=`, or leave out `empty_init`." + see("layers")
        )
