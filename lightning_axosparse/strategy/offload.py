"""Keeps the optimizer's state and master weights in host memory, and steps there in buckets.

The device keeps parameters and gradients. In a step their values and gradients are copied to the
host bucket by bucket, the user's own optimizer steps them there, and the values are copied back
while the next bucket is stepped. AxoNN (Singh & Bhatele, IPDPS 2022) copies the state to
the device instead and steps there, which takes 16 bytes of device memory for each element of a
bucket; this takes none.

As in AxoNN, the all-reduces that have not ended with the backward pass run while buckets whose
gradients are reduced are stepped, those of the last layers first; but not where clipping, loss
scaling or a hook reads all gradients before.

On a CUDA device the copies go through pinned memory, which has not been run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard.param_groups import closure_called
from lightning_axosparse.sparse.module.elementwise import trial_copy
from lightning_axosparse.sparse.module.optimizer_state import MASTER, master_values
from lightning_axosparse.sparse.store.materialize import master_dtype
from lightning_axosparse.support.troubleshooting import see, without_link

HOST = torch.device("cpu")


class OptimizerOffload:
    """Steps an optimizer on the host, whatever device its parameters are on.

    The optimizer stays the same object with the same parameters: they are the keys of its state,
    and clipping, loss scaling and hooks see them and their gradients on the device. The numbers are
    the same to the bit as those of the same optimizer on the CPU. For a parameter of less than 32
    bits its float32 master weights are stepped, and the device gets their rounded values.

    Args:
        optimizer: the user's, configured.
        bucket: elements that are stepped at a time; a larger parameter is a bucket of its own.
        device: device of the parameters.
        await_gradients: waits until the gradients of the parameters it is given are reduced.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: int,
        device: torch.device,
        await_gradients: Callable[[Sequence[nn.Parameter]], None] = lambda _: None,
    ) -> None:
        self._optimizer, self._bucket, self._await = optimizer, bucket, await_gradients
        self._device = device
        self._gradients: dict[nn.Parameter, Tensor] = {}
        if optimizer.state:  # Adagrad's constructor makes it.
            self.load_state_dict(optimizer.state_dict())
        self._hooks = [
            optimizer.register_step_pre_hook(self._step),
            optimizer.register_step_post_hook(self._show_gradients),
        ]

    def remove(self) -> None:
        """Let the optimizer step on the device of its parameters again."""
        for hook in self._hooks:
            hook.remove()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer's state onto the host, in the precision of the master weights."""
        masters: dict[Tensor, Tensor] = {
            parameter: torch.empty((), dtype=master_dtype(parameter.dtype)).expand(parameter.shape)
            for parameter in self._parameters()
        }
        with _substituted(self._optimizer, masters):
            self._optimizer.load_state_dict(dict(state))

    def _step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Step on the host, and leave the optimizer's own step, which follows, nothing to do."""
        kwargs = closure_called(args, kwargs)
        with torch.no_grad():
            for parameters in self._buckets():
                self._step_bucket(optimizer, parameters)
        self._await(list(self._parameters()))
        self._hide_gradients()
        return (optimizer,), kwargs

    def _step_bucket(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Step some parameters on the host, and start the copies of their values to the device."""
        values = [_to_host(parameter) for parameter in parameters]
        gradients = [_to_host(p.grad) for p in parameters if p.grad is not None]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        masters: dict[Tensor, Tensor] = {}
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            kept = optimizer.state[parameter].pop(MASTER, None)
            master = nn.Parameter(master_values(value, kept, master_dtype(value.dtype)))
            master.grad = gradient.to(master.dtype)
            masters[parameter] = master
        with _substituted(optimizer, masters), _without_hooks(optimizer):
            type(optimizer).step(optimizer)
        for parameter, value in zip(parameters, values, strict=True):
            master_value = masters[parameter].detach()
            if master_value.dtype != parameter.dtype:
                optimizer.state[parameter][MASTER] = master_value
                value.copy_(master_value)
            parameter.copy_(value, non_blocking=True)

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """The buckets, each once its gradients are reduced; those of the last layers are first."""
        trained = [parameter for parameter in self._parameters() if parameter.grad is not None]
        for parameters in bucketed(reversed(trained), self._bucket):
            self._await(parameters)
            # Only now it is known which gradients no rank has.
            yield [parameter for parameter in parameters if parameter.grad is not None]

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _hide_gradients(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._gradients[parameter] = parameter.grad
                parameter.grad = None

    def _show_gradients(self, *_: Any) -> None:
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients = {}


def validate_bucketwise_optimizers(optimizer: Optimizer) -> None:
    """Check that an optimizer can step its parameters on the host and one after the other.

    This takes trial steps of an optimizer of the same class and settings on small random
    parameters; the optimizer itself is not changed.

    Raises:
        MisconfigurationException: if the numbers differ from those of a step as a whole, or one of
            them cannot be taken.
    """
    for group in optimizer.param_groups:
        try:
            whole, offloaded = (_tried(optimizer, group, offload) for offload in (False, True))
        except Exception as error:
            raise _cannot_offload(
                optimizer, f"a trial step on the CPU failed: {without_link(error)}"
            ) from error
        if not torch.allclose(whole, offloaded):
            raise _cannot_offload(optimizer, "one parameter after the other gives other numbers")


def _tried(optimizer: Optimizer, group: Mapping[str, Any], offload: bool) -> Tensor:
    """Two small random parameters after a few trial steps."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        numbers = torch.randn(4, 2, 3, 5)
    parameters = [nn.Parameter(values.clone()) for values in numbers[0]]
    trial = trial_copy(optimizer, group, parameters)
    if offload:
        OptimizerOffload(trial, 1, HOST)
    for gradients in numbers[1:]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        type(trial).step(trial)
    return torch.stack([parameter.detach() for parameter in parameters])


def _cannot_offload(optimizer: Optimizer, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(optimizer).__name__} cannot be offloaded: {reason}. offload_optimizer=True steps "
        "parameters on the CPU, bucket by bucket: use AdamW, Adam, SGD, RMSprop, NAdam, Adagrad or "
        "the like, with their default `capturable=False`, or leave offload_optimizer out."
        + see("optimizers")
    )


@contextmanager
def _substituted(optimizer: Optimizer, substitutes: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Give an optimizer some tensors, with the state, in place of its parameters; no others."""
    parameters = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [substitutes[p] for p in group["params"] if p in substitutes]
    for parameter, substitute in substitutes.items():
        _move_state(optimizer, parameter, substitute)
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = params
        for parameter, substitute in substitutes.items():
            _move_state(optimizer, substitute, parameter)


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Keep the optimizer's hooks from running: they belong to the whole step, not to a bucket's."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = {name: getattr(optimizer, name) for name in names}
    vars(optimizer).update({name: {} for name in names})
    try:
        yield
    finally:
        vars(optimizer).update(hooks)


def _move_state(optimizer: Optimizer, owner: Tensor, to: Tensor) -> None:
    state = optimizer.state.pop(owner, None)
    if state:
        optimizer.state[to] = state


def _to_host(tensor: Tensor) -> Tensor:
    # A non-blocking copy from a CUDA device goes to pinned memory.
    return tensor.detach().to(HOST, non_blocking=True, copy=True)


def bucketed(parameters: Iterable[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Split parameters in order into buckets of at most ``size`` elements, or one parameter."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not buckets or parameter.numel() > room:
            buckets.append([])
            room = size
        buckets[-1].append(parameter)
        room -= parameter.numel()
    return buckets
