"""Copies the global flags of torch that a script may set from one process to another.

The number of threads is not copied, as each rank has its own share of the cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

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


def flags(names: Iterable[str] = (*_SETTERS, *_ATTRIBUTES)) -> dict[str, Any]:
    """Return the values of flags in this process, without those that this torch does not have."""
    values = {}
    for name in names:
        with suppress(AttributeError, RuntimeError):  # Some raise if they were set in another way.
            values[name] = _flag(name)
    return values


def set_flags(values: dict[str, Any]) -> None:
    """Set the flags that have other values in this process."""
    for name, value in values.items():
        if value == flags([name]).get(name):
            continue
        if name in _SETTERS:
            attrgetter(_SETTERS[name])(torch)(value)
        else:
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(torch), attribute, value)


def _flag(name: str) -> Any:
    value = attrgetter(name)(torch)
    return value() if name in _SETTERS else value
