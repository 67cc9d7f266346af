"""Adapts Lightning's ``backward`` to gradients that ``training_step`` has already computed.

They are stashed until Lightning calls ``backward``, so that hooks see them; a precision plugin
clips by the norm over all stages and scales alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard.remote_tensor import local_param_groups
from lightning_axosparse.pipeline.shard.sharding import RemoteGradients
from lightning_axosparse.strategy.compat.internals import RankLocalCallback, callbacks_of, overrides
from lightning_axosparse.support.trace import clock

_CLEARING_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")


class StashedGradients:
    """Stores the gradients of a batch from ``training_step`` to ``backward``.

    Lightning's closure calls ``training_step``, then ``zero_grad``, then ``backward``. So the
    gradients of a batch are computed apart from those of earlier batches, and added to these in
    ``backward``, unless ``zero_grad`` has cleared them. Gradients that ``zero_grad`` is going to
    clear, and that no hook sees before, are freed when the step begins, so that memory holds one
    set of gradients at a time.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._frees = not clearing_is_seen(trainer)
        self._fresh: dict[nn.Parameter, Tensor | None] = {}
        self._trained: set[nn.Parameter] = set()
        self.earlier: dict[nn.Parameter, Tensor | None] = {}
        """Inside a step, the gradients of earlier batches; None once one has been added."""

    @contextmanager
    def around_step(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Compute gradients of ``parameters`` inside the context."""
        self.earlier = {parameter: parameter.grad for parameter in parameters}
        self._trained = {parameter for parameter in self.earlier if parameter.requires_grad}
        for parameter in self.earlier:
            parameter.grad = None
        if self._frees and starts_accumulation(self._trainer):
            groups = [group for each in self._trainer.optimizers for group in each.param_groups]
            cleared = {parameter for group in groups for parameter in group["params"]}
            self.earlier.update(dict.fromkeys(cleared & self.earlier.keys()))
        yield
        self._fresh = {parameter: parameter.grad for parameter in self.earlier}
        for parameter, gradient in self.earlier.items():
            parameter.grad = gradient
        self.earlier = {}

    def restore(self) -> None:
        """Add the gradients of the batch to those that ``zero_grad`` has left.

        As in torch, a parameter that the step has frozen after its layers gets none.
        """
        for parameter, gradient in self._fresh.items():
            frozen = parameter in self._trained and not parameter.requires_grad
            if gradient is None or frozen:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = parameter.grad + gradient
        self._fresh = {}


def starts_accumulation(trainer: pl.Trainer) -> bool:
    """Whether Lightning calls ``zero_grad`` in the current batch."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def gradients_are_seen(trainer: pl.Trainer) -> bool:
    """Whether anything reads gradients between the backward pass and the optimizer step.

    Clipping and loss scaling do, and so may hooks of the module or of a callback, and a module that
    optimizes by hand.
    """
    return (
        bool(trainer.gradient_clip_val)
        or not trainer.lightning_module.automatic_optimization
        or getattr(trainer.precision_plugin, "scaler", None) is not None
        or overrides(trainer.lightning_module, "optimizer_step", "optimizer_zero_grad")
        or any(_hooks_that_read(trainer))
    )


def clearing_is_seen(trainer: pl.Trainer) -> bool:
    """Whether anything sees the gradients that ``zero_grad`` clears, or clears them differently.

    Hooks of the module or of a callback may, and optimizers with a ``zero_grad`` of their own.
    """
    return (
        overrides(trainer.lightning_module, *_CLEARING_HOOKS)
        or any(overrides(callback, "on_before_zero_grad") for callback in callbacks_of(trainer))
        or any(type(each).zero_grad is not Optimizer.zero_grad for each in trainer.optimizers)
    )


def _hooks_that_read(trainer: pl.Trainer) -> tuple[bool, bool]:
    """Whether hooks of the user may read gradients after ``backward``; and before the step."""
    module = trainer.lightning_module
    owners = (module, *_user_callbacks(trainer))
    after_backward = any(overrides(each, "on_after_backward") for each in owners)
    before_step = overrides(module, "configure_gradient_clipping") or any(
        overrides(each, "on_before_optimizer_step") for each in owners
    )
    return after_backward, before_step


def _user_callbacks(trainer: pl.Trainer) -> list[Callback]:
    """Return the callbacks that the strategy has not added itself."""
    return [each for each in callbacks_of(trainer) if not isinstance(each, RankLocalCallback)]


class GradientNorms(RankLocalCallback):
    """Measures the gradient norms of all stages for hooks; collective if a hook may read them."""

    def __init__(
        self,
        trainer: pl.Trainer,
        gradients: RemoteGradients,
        follow_changes: Callable[[], None],
    ) -> None:
        self._gradients, self._follow_changes = gradients, follow_changes
        self._after_backward, self._before_step = _hooks_that_read(trainer)

    def on_after_backward(self, *_: Any) -> None:
        """Measure the norms that hooks of this name may read."""
        if self._after_backward:
            self._follow_changes()
            self._gradients.measure()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Measure the norms that hooks of this name, and the module's own clipping, may read."""
        if self._before_step:
            self._follow_changes()
            self._gradients.measure()


def pipeline_precision(
    plugin: Precision,
    whole_group: dist.ProcessGroup | None,
    world_group: dist.ProcessGroup | None,
    counted: Callable[[nn.Parameter], bool],
    clipped: Callable[[], object],
) -> None:
    """Adapt a precision plugin to a module whose parameters are spread over stages.

    The plugin's class becomes a subclass of its own class, with the name unchanged, since Lightning
    stores the plugin's state in checkpoints under that name. :func:`restore_precision` undoes it.

    Args:
        plugin: the plugin that Lightning or the user chose; changed in place.
        whole_group: the ranks that have the whole model together; None if this one has it all.
        world_group: all ranks, which have to agree on the scale of the loss; None if there is one.
        counted: whether this stage counts a parameter in the norm. A parameter that several stages
            hold, with the same gradient, must be counted by exactly one.
        clipped: called when gradients were clipped.
    """
    restore_precision(plugin)
    functions = {"_counted": staticmethod(counted), "_clipped": staticmethod(clipped)}
    _mix_in(plugin, _PipelineClipping, _whole_group=whole_group, **functions)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        _mix_in(scaler, _AgreedScaler, _world_group=world_group)


def replace_backward(plugin: Precision, give_gradients: Callable[[], None]) -> None:
    """Let a precision plugin use gradients that exist, instead of differentiating."""
    _mix_in(plugin, _ReplacedBackward, _give_gradients=staticmethod(give_gradients))


def show_whole_gradients(
    plugin: Precision, trainer: pl.Trainer, whole: Callable[[], AbstractContextManager[None]]
) -> None:
    """Let a precision plugin call hooks that read gradients in a context with whole gradients."""
    contexts = [whole if reads else nullcontext for reads in _hooks_that_read(trainer)]
    functions = zip(("_after_backward", "_before_step"), map(staticmethod, contexts), strict=True)
    _mix_in(plugin, _WholeGradients, **dict(functions))


def surround_backward(
    plugin: Precision, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Let a precision plugin run each backward pass in a context."""
    restore_precision(plugin)
    _mix_in(plugin, _SurroundedBackward, _context=staticmethod(context))


def restore_precision(plugin: Precision) -> None:
    """Restore the plugin's own methods; the loss scale does not change."""
    for instance in (plugin, getattr(plugin, "scaler", None)):
        while isinstance(instance, _Mixin):
            _, instance.__class__ = type(instance).__bases__


def scale_loss(plugin: Precision, loss: Tensor) -> Tensor:
    """Multiply the loss by the loss scale, if there is one."""
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)


class _Mixin:
    """Base of classes that are put in front of an instance's class; copies are without them."""

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


class _WholeGradients(_Mixin):
    """Makes a precision plugin call hooks that read gradients in contexts."""

    _after_backward: Callable[[], AbstractContextManager[None]]
    _before_step: Callable[[], AbstractContextManager[None]]

    def post_backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the hooks after ``backward``."""
        with self._after_backward():
            loss: Tensor = super().post_backward(*args, **kwargs)  # type: ignore[misc]
            return loss

    def _after_closure(self, *args: Any, **kwargs: Any) -> None:
        with self._before_step():
            super()._after_closure(*args, **kwargs)  # type: ignore[misc]


class _ReplacedBackward(_Mixin):
    """Makes a precision plugin use gradients that exist."""

    _give_gradients: Callable[[], None]

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Run the hooks alone: a plugin's own method would scale the loss a second time."""
        return Precision.pre_backward(cast(Precision, self), tensor, module)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Set the gradients of parameters."""
        self._give_gradients()


class _PipelineClipping(_Mixin):
    """Makes a precision plugin clip by the norm over all stages."""

    _whole_group: dist.ProcessGroup | None
    _counted: Callable[[nn.Parameter], bool]
    _clipped: Callable[[], object]
    main_params: Callable[[Optimizer], Any]

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of this stage."""
        super().clip_gradients(*args, **kwargs)  # type: ignore[misc]
        self._clipped()

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the gradients so that their norm over all stages is at most ``clip_val``."""
        with local_param_groups(optimizer):
            held = [p for p in self.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm([p.grad for p in held if self._counted(p)])
        # On the CPU, since a stage without any gradient has no other device to name.
        squares = norm.to("cpu", torch.float64).square()
        _all_reduce(squares, dist.ReduceOp.SUM, self._whole_group)
        if held:
            like = held[0].grad
            norm = squares.sqrt().to(like.device, like.dtype.to_real())
            clip_grads_with_norm_(held, clip_val, norm)


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
        with local_param_groups(optimizer):
            by_device: dict[torch.device, Tensor] = super()._unscale_grads_(  # type: ignore[misc]
                optimizer, inv_scale, found_inf, allow_fp16
            )
        anywhere = torch.tensor([float(any(here.item() for here in by_device.values()))])
        _all_reduce(anywhere, dist.ReduceOp.MAX, self._world_group)
        by_device = by_device or {found_inf.device: found_inf}
        for here in by_device.values():
            here.fill_(anywhere.item())
        return by_device


def _new(own: type) -> Any:
    return object.__new__(own)


def _mix_in(instance: object, mixin: type, **attributes: Any) -> None:
    """Put ``mixin`` in front of the instance's class, whose name and module stay."""
    base = type(instance)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    instance.__class__ = type(base.__name__, (mixin, base), {**names, **attributes})


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        with clock.span("wait"):
            dist.all_reduce(tensor, op=op, group=group)


def tolerance_of(precision: Precision, device: torch.device) -> float:
    """Return the relative difference below which values count as equal in this precision."""
    name = str(precision.precision)
    if name.startswith("64"):
        return 1e-7
    coarse = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return 1e-4 if name.startswith("32") and not coarse else 3e-2
