"""Makes a precision plugin differentiate, clip gradients and scale losses as the ranks need it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard.param_groups import own_param_groups
from lightning_axosparse.support.trace import clock


def pipeline_precision(
    plugin: Precision,
    inter_group: dist.ProcessGroup | None,
    world_group: dist.ProcessGroup | None,
    counted: Callable[[nn.Parameter], bool],
    clipped: Callable[[], object],
) -> None:
    """Adapt a precision plugin to a module whose parameters are spread over stages.

    The plugin's class becomes a subclass of its own class, with the name unchanged, since Lightning
    stores the plugin's state in checkpoints under that name. :func:`restore_precision` undoes it.

    Args:
        plugin: what Lightning or the user chose; changed in place.
        inter_group: the stages of this pipeline; None if this process runs all of them.
        world_group: all ranks, which have to agree on the scale of the loss; None if there is one.
        counted: whether this stage counts a parameter in the norm. A parameter that several stages
            hold, with the same gradient, must be counted by exactly one.
        clipped: called when gradients were clipped.
    """
    restore_precision(plugin)
    functions = {"_counted": staticmethod(counted), "_clipped": staticmethod(clipped)}
    _mix_in(plugin, _PipelineClipping, _inter_group=inter_group, **functions)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        _mix_in(scaler, _AgreedScaler, _world_group=world_group)


def replace_backward(plugin: Precision, give_gradients: Callable[[], None]) -> None:
    """Let a precision plugin take over gradients that there are, instead of differentiating.

    Args:
        plugin: a plugin after :func:`pipeline_precision`; changed in place, until
            :func:`restore_precision`.
        give_gradients: gives parameters their gradients.
    """
    _mix_in(plugin, _ReplacedBackward, _give_gradients=staticmethod(give_gradients))


def surround_backward(
    plugin: Precision, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Let a precision plugin run each backward pass in a context, as if it did so itself.

    Args:
        plugin: what Lightning or the user chose; changed in place, until :func:`restore_precision`.
        context: makes the context.
    """
    restore_precision(plugin)
    _mix_in(plugin, _SurroundedBackward, _context=staticmethod(context))


def restore_precision(plugin: Precision) -> None:
    """Give the plugin its own methods back; the loss scale keeps its value."""
    _take_out(plugin, _SurroundedBackward)
    _take_out(plugin, _ReplacedBackward)
    _take_out(plugin, _PipelineClipping)
    _take_out(getattr(plugin, "scaler", None), _AgreedScaler)


def scale_loss(plugin: Precision, loss: Tensor) -> Tensor:
    """Multiply the loss by the loss scale, if there is one."""
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)


class _Mixin:
    """What is put in front of an instance's class; a copy of the instance is without it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = next(base for base in type(self).__mro__ if not issubclass(base, _Mixin))
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _new, (own,), state


class _SurroundedBackward(_Mixin):
    """Makes a precision plugin run each backward pass in a context."""

    _context: Callable[[], AbstractContextManager[None]]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Differentiate a loss."""
        with self._context():
            super().backward(*args, **kwargs)  # type: ignore[misc]


class _ReplacedBackward(_Mixin):
    """Makes a precision plugin take over gradients that there are."""

    _give_gradients: Callable[[], None]

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Run the hooks alone: a plugin's own method would scale the loss, which is done."""
        return Precision.pre_backward(cast(Precision, self), tensor, module)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Give the parameters their gradients."""
        self._give_gradients()


class _PipelineClipping(_Mixin):
    """Makes a precision plugin clip by the norm over all stages."""

    _inter_group: dist.ProcessGroup | None
    _counted: Callable[[nn.Parameter], bool]
    _clipped: Callable[[], object]
    main_params: Callable[[Optimizer], Any]

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of this stage."""
        super().clip_gradients(*args, **kwargs)  # type: ignore[misc]
        self._clipped()

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the gradients so that their norm over all stages is at most ``clip_val``."""
        with own_param_groups(optimizer):
            held = [p for p in self.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm([p.grad for p in held if self._counted(p)])
        # On the CPU, since a stage without any gradient has no other device to name.
        squares = norm.to("cpu", torch.float64).square()
        _all_reduce(squares, dist.ReduceOp.SUM, self._inter_group)
        if held:
            clip_grads_with_norm_(held, clip_val, squares.sqrt().to(held[0].grad))


class _AgreedScaler(_Mixin):
    """Makes a gradient scaler find the same infinities, and so keep the same scale, on all ranks.

    Only last stages scale a loss, and a stage may have no gradients: PyTorch's own scaler raises
    for both.
    """

    _world_group: dist.ProcessGroup | None
    _scale: Tensor | None
    _device: str
    _lazy_init_scale_growth_tracker: Callable[[torch.device], None]

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        checked: tuple[Tensor, Tensor] = super()._check_scale_growth_tracker(funcname)  # type: ignore[misc]
        return checked

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with own_param_groups(optimizer):
            found: dict[torch.device, Tensor] = super()._unscale_grads_(  # type: ignore[misc]
                optimizer, inv_scale, found_inf, allow_fp16
            )
        anywhere = torch.tensor([float(any(here.item() for here in found.values()))])
        _all_reduce(anywhere, dist.ReduceOp.MAX, self._world_group)
        found = found or {found_inf.device: found_inf}
        for here in found.values():
            here.fill_(anywhere.item())
        return found


def _new(own: type) -> Any:
    return object.__new__(own)


def _mix_in(instance: object, mixin: type, **attributes: Any) -> None:
    """Put ``mixin`` in front of the instance's class, whose name and module stay."""
    base = type(instance)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    instance.__class__ = type(base.__name__, (mixin, base), {**names, **attributes})


def _take_out(instance: object, mixin: type) -> None:
    """Give the instance its own class back."""
    if isinstance(instance, mixin):
        _, instance.__class__ = type(instance).__bases__


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        with clock.span("wait"):
            dist.all_reduce(tensor, op=op, group=group)


def tolerance_of(precision: Precision, device: torch.device) -> float:
    """By how much equal values may differ in this precision, relative to their size."""
    name = str(precision.precision)
    if name.startswith("64"):
        return 1e-7
    coarse = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return 1e-4 if name.startswith("32") and not coarse else 3e-2
