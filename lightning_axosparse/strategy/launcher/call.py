"""A call as it is sent to its ranks: the function, the Trainer, and settings of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_axosparse.strategy.compat.internals import random_states, set_random_states
from lightning_axosparse.strategy.launcher.changes import named_objects

# Names in torch.
_SETTERS = {
    "__future__.get_overwrite_module_params_on_conversion": (
        "__future__.set_overwrite_module_params_on_conversion"
    ),
    "__future__.get_swap_module_params_on_conversion": (
        "__future__.set_swap_module_params_on_conversion"
    ),
    "backends.cuda.cudnn_sdp_enabled": "backends.cuda.enable_cudnn_sdp",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
    "backends.cuda.preferred_blas_library": "backends.cuda.preferred_blas_library",
    "backends.cuda.preferred_linalg_library": "backends.cuda.preferred_linalg_library",
    "backends.mha.get_fastpath_enabled": "backends.mha.set_fastpath_enabled",
    "get_default_device": "set_default_device",
    "get_default_dtype": "set_default_dtype",
    "get_deterministic_debug_mode": "set_deterministic_debug_mode",
    "get_float32_matmul_precision": "set_float32_matmul_precision",
    "is_anomaly_enabled": "autograd.set_detect_anomaly",
    "is_grad_enabled": "set_grad_enabled",
    "is_warn_always_enabled": "set_warn_always",
    "multiprocessing.get_sharing_strategy": "multiprocessing.set_sharing_strategy",
    "serialization.get_safe_globals": "serialization.add_safe_globals",
}
"""Function that returns a flag -> function that sets it."""
_ATTRIBUTES = (
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.deterministic",
    "backends.cudnn.enabled",
    "backends.cudnn.rnn.fp32_precision",
    "backends.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.enabled",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
    "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
    "backends.quantized.engine",
    "utils.deterministic.fill_uninitialized_memory",
)


@dataclass(frozen=True)
class ProcessState:
    """Global state on which a call depends: random states, flags of torch, ``sys.argv``."""

    random: dict[str, Any]
    flags: dict[str, Any]
    argv: list[str]

    @classmethod
    def of_this_process(cls) -> ProcessState:
        """Return the state of this process."""
        cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(random_states(include_cuda=cuda_in_use), torch_flags(), sys.argv)

    def restore(self) -> None:
        """Set the state of this process."""
        set_random_states(self.random)
        set_torch_flags(self.flags)
        sys.argv = self.argv


def origin_of_main() -> dict[str, Any]:
    """Return the origin of ``__main__``, which processes that a rank spawns import again.

    It is the file of a script, or the spec of the module that ``python -m`` runs.
    """
    main = vars(sys.modules["__main__"])
    origin = {"__file__": main["__file__"]} if "__file__" in main else {}
    if spec := main.get("__spec__"):
        origin["__spec__"] = ModuleSpec(spec.name, loader=None)
    return origin


@dataclass(frozen=True)
class Call:
    """A call that each rank runs."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trainer: Trainer | None
    state: ProcessState
    main: dict[str, Any]

    @property
    def named_objects(self) -> dict[str, Any]:
        """The objects that exist both in the caller and on the ranks, by name."""
        if self.trainer is None:
            return {}
        return named_objects(self.trainer, (*self.args, *self.kwargs.values()))


def torch_flags(names: Iterable[str] = (*_SETTERS, *_ATTRIBUTES)) -> dict[str, Any]:
    """Return the values of torch's flags here, without those that this torch does not have.

    The number of threads is not one of them, as each rank has its own share of the cores.
    """
    values = {}
    for name in names:
        with suppress(AttributeError, RuntimeError):  # Some raise if they were set in another way.
            values[name] = _flag(name)
    return values


def set_torch_flags(values: dict[str, Any]) -> None:
    """Set the flags that have other values in this process."""
    for name, value in values.items():
        if value == torch_flags([name]).get(name):
            continue
        if name in _SETTERS:
            attrgetter(_SETTERS[name])(torch)(value)
        else:
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(torch), attribute, value)


def _flag(name: str) -> Any:
    value = attrgetter(name)(torch)
    return value() if name in _SETTERS else value
