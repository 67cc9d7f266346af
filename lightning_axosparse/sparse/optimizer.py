"""Optimizer: its state of a parameter, dense or compact, and which ones do without matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_axosparse.sparse.layout import Layout

_TRIAL_SHAPE = (4, 6)
_TRIAL_STEPS = 3
_TRIAL_LR = 1e-2


def compress_state(
    state: Mapping[str, Any], layout: Layout, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """One parameter's optimizer state with every tensor of its dense shape reduced to kept entries.

    Args:
        state: what ``optimizer.state[parameter]`` or the ``state`` of an optimizer's state dict
            holds for a dense parameter. Other entries (``step``) are passed on as they are.
        layout: the parameter's kept entries.
        dtype: what these tensors become; None leaves theirs.
    """
    return {
        key: layout.to(value.device).compress(value).to(dtype or value.dtype)
        if isinstance(value, Tensor) and value.shape == layout.shape
        else value
        for key, value in state.items()
    }


def expand_state(
    state: Mapping[str, Any], layout: Layout, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """The inverse of :func:`compress_state`: tensors of kept entries become dense."""
    return {
        key: layout.to(value.device).densify(value.to(dtype or value.dtype))
        if isinstance(value, Tensor) and value.shape == (layout.nnz,)
        else value
        for key, value in state.items()
    }


def check_state(name: str, state: Mapping[str, Any], shape: torch.Size) -> None:
    """Refuse optimizer state that is neither one number nor elementwise.

    Raises:
        ValueError: naming the parameter and the entry that cannot be compressed.
    """
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
            raise ValueError(
                f"Optimizer state '{key}' of parameter '{name}' has shape {tuple(value.shape)}, "
                f"the parameter {tuple(shape)}: it cannot be reduced to the kept entries. Use an "
                "elementwise optimizer such as AdamW or SGD."
            )


def refuse_matrix_optimizers(optimizer: Optimizer) -> None:
    """Refuse an optimizer that updates a matrix otherwise than the vector of its entries.

    After the swap a pruned matrix is the vector of its kept entries, so the optimizer must not look
    at rows and columns. That is tried out, with the optimizer's own class and settings, on a small
    random matrix and on the same numbers as a vector; nothing of the optimizer itself is touched.

    Raises:
        MisconfigurationException: if the two differ or one of them cannot be stepped: Adafactor,
            Muon, Shampoo, LBFGS, SparseAdam.
    """
    for group in optimizer.param_groups:
        matrix = next((p for p in group["params"] if p.dim() >= 2 and not p.is_meta), None)
        if matrix is None:
            continue
        try:
            as_matrix, as_vector = (
                _tried(optimizer, group, matrix, shape) for shape in (_TRIAL_SHAPE, (-1,))
            )
        except Exception as error:
            raise _refusal(optimizer, f"a trial step failed: {error}") from error
        if not torch.allclose(as_matrix, as_vector):
            raise _refusal(
                optimizer, "it updates a matrix otherwise than the vector of its entries"
            )


def _tried(
    optimizer: Optimizer, group: dict[str, Any], like: nn.Parameter, shape: tuple[int, ...]
) -> Tensor:
    """The entries of a small random matrix, shaped as ``shape``, after a few steps."""
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        torch.manual_seed(0)
        numbers = torch.randn(1 + _TRIAL_STEPS, *_TRIAL_SHAPE).to(like.device, like.dtype)
        parameter = nn.Parameter(numbers[0].reshape(shape).clone())
        trial = copy_for(optimizer, group, [parameter])
        for gradient in numbers[1:]:
            parameter.grad = gradient.reshape(shape).clone()
            type(trial).step(trial)
    return parameter.detach().reshape(-1)


def copy_for(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """An optimizer to try out: the settings of ``group`` for other parameters, and no hooks.

    The learning rate is set, because a warm-up schedule may have begun at zero.
    """
    settings = {**group, "params": list(parameters)}
    if settings.get("lr") is not None:
        settings["lr"] = settings["lr"] * 0 + _TRIAL_LR
    without_hooks = vars(SGD(parameters, lr=0.0))
    copy = type(optimizer).__new__(type(optimizer))
    vars(copy).update({**vars(optimizer), **without_hooks, "defaults": optimizer.defaults})
    copy.param_groups = [settings]
    copy.state = defaultdict(dict)
    return copy


def _refusal(optimizer: Optimizer, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(optimizer).__name__} cannot train sparse weights: {reason}. A pruned weight is "
        "kept as the vector of its kept entries, so the optimizer must be elementwise: use AdamW, "
        "Adam, SGD, RMSprop, NAdam, Adagrad or the like."
    )
