"""Precision: clipping by the norm of the whole pipeline, and one loss scale for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_axosparse.timing import clock


def pipeline_precision(
    plugin: Precision,
    inter_group: dist.ProcessGroup | None,
    world_group: dist.ProcessGroup | None,
    counted: Callable[[nn.Parameter], bool],
) -> Precision:
    """Make a precision plugin right for a module whose parameters lie on several stages.

    The plugin's class becomes a subclass of its own class, with the name unchanged, since Lightning
    files the plugin's state in checkpoints under that name.

    Args:
        plugin: what Lightning or the user chose; changed in place.
        inter_group: the stages of this pipeline; None if this process runs all of them.
        world_group: all ranks, which have to agree on the scale of the loss; None if there is one.
        counted: whether this stage counts a parameter in the norm. A parameter that several stages
            hold, with the same gradient, must be counted by exactly one.

    Returns:
        The same plugin.
    """
    _mix_in(plugin, _PipelineClipping)
    vars(plugin).update(_inter_group=inter_group, _counted=counted)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        _mix_in(scaler, _AgreedScaler)
        scaler._world_group = world_group
    return plugin


def scale_loss(plugin: Precision, loss: Tensor) -> Tensor:
    """The loss as backward shall start from it: multiplied by the loss scale if there is one."""
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)


class _PipelineClipping:
    """A precision plugin that clips by the norm over all stages."""

    _inter_group: dist.ProcessGroup | None
    _counted: Callable[[nn.Parameter], bool]
    main_params: Callable[[Optimizer], Any]

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the gradients so that their norm over all stages is at most ``clip_val``."""
        held = [p for p in self.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm([p.grad for p in held if self._counted(p)])
        # On the CPU, since a stage without any gradient has no other device to name.
        squares = norm.to("cpu", torch.float64).square()
        _all_reduce(squares, dist.ReduceOp.SUM, self._inter_group)
        if held:
            clip_grads_with_norm_(held, clip_val, squares.sqrt().to(held[0].grad))


class _AgreedScaler:
    """A gradient scaler that finds the same infinities, and so keeps the same scale, on all ranks.

    Only last stages scale a loss, and a stage may have no gradients: both are errors to PyTorch's
    own scaler.
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
        found: dict[torch.device, Tensor] = super()._unscale_grads_(  # type: ignore[misc]
            optimizer, inv_scale, found_inf, allow_fp16
        )
        anywhere = torch.tensor([float(any(here.item() for here in found.values()))])
        _all_reduce(anywhere, dist.ReduceOp.MAX, self._world_group)
        found = found or {found_inf.device: found_inf}
        for here in found.values():
            here.fill_(anywhere.item())
        return found


def _mix_in(instance: object, mixin: type) -> None:
    """Put ``mixin`` in front of the instance's class, whose name and module stay."""
    base = type(instance)
    if not isinstance(instance, mixin):
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        instance.__class__ = type(base.__name__, (mixin, base), names)


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        with clock.span("wait"):
            dist.all_reduce(tensor, op=op, group=group)
