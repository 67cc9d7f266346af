"""Steps optimizers: at scaled rates, and bucket by bucket in host memory or each replica its share.

With ``offload_optimizer`` the device keeps parameters and gradients. In a step their values and
gradients are copied to the host bucket by bucket, the user's own optimizer steps them there, and
the values are copied back while the next bucket is stepped. AxoNN (Singh & Bhatele, IPDPS 2022)
copies the state to the device instead and steps there, which takes 16 bytes of device memory for
each element of a bucket; this takes none.

With ``shard_optimizer`` a replica steps its share of each bucket, and gets the others' while the
next bucket is stepped.

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

from lightning_axosparse.pipeline.shard.remote_tensor import closure_called
from lightning_axosparse.sparse.module.elementwise import trial_steps
from lightning_axosparse.sparse.module.optimizer_state import MASTER, master_values
from lightning_axosparse.sparse.store.materialize import master_dtype
from lightning_axosparse.strategy.optimizer_shards import OptimizerShards
from lightning_axosparse.support.troubleshooting import see, without_link


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of all parameter groups inside the context.

    Schedulers, which may compute a rate from the one before, see the rates as they are outside. A
    rate that is set inside the context stays as it was set.

    Args:
        optimizer: the optimizer that steps inside.
        factor: what its rates are multiplied by.
    """
    groups = [group for group in optimizer.param_groups if "lr" in group]
    own = [group["lr"] for group in groups]
    scaled = own if factor == 1 else [rate * factor for rate in own]
    for group, rate in zip(groups, scaled, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, before, rate in zip(groups, own, scaled, strict=True):
            if group["lr"] is rate:
                group["lr"] = before


HOST = torch.device("cpu")
BUCKET = 4_000_000
"""Elements that are stepped at a time."""


class Placement:
    """Where an optimizer's state is, and is stepped: where the parameters are."""

    def take(self, tensor: Tensor) -> Tensor:
        """A tensor, to be stepped, in this place."""
        return tensor

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which parameters of that dtype are stepped."""
        return dtype

    def like(self, parameter: Tensor) -> Tensor:
        """A number on the device and of the dtype of a parameter's state."""
        number = torch.zeros((), dtype=self.dtype(parameter.dtype), device=parameter.device)
        return self.take(number)

    def await_copies(self, parameters: Sequence[Tensor]) -> None:
        """Wait until what was taken is there."""


class HostMemory(Placement):
    """Host memory, where parameters of less than 32 bits have float32 master weights."""

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor; from a CUDA device it comes later, to pinned memory."""
        return tensor.to(HOST, non_blocking=True, copy=True)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of master weights."""
        return master_dtype(dtype)

    def await_copies(self, parameters: Sequence[Tensor]) -> None:
        """Wait until what was taken is there."""
        for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


class BucketwiseOptimizer:
    """Steps an optimizer bucket by bucket, and keeps its state where it is stepped.

    The optimizer stays the same object with the same parameters: they are the keys of its state,
    and clipping, loss scaling and hooks see them and their gradients on the device. The numbers are
    the same to the bit as those of the same optimizer in that place without buckets. In host memory
    the float32 master weights of a parameter of less than 32 bits are stepped, and the device gets
    their rounded values.

    Args:
        optimizer: the user's, configured.
        place: where the state is.
        shards: which part of the state this replica keeps; None for all.
        await_gradients: waits until the gradients of the parameters it is given are reduced.
        bucket: elements that are stepped at a time; a larger parameter is a bucket of its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        place: Placement,
        shards: OptimizerShards | None = None,
        await_gradients: Callable[[Sequence[nn.Parameter]], None] = lambda _: None,
        bucket: int = BUCKET,
    ) -> None:
        self._optimizer, self._place, self._shards = optimizer, place, shards
        self._await, self._bucket = await_gradients, bucket
        self._gradients: dict[nn.Parameter, Tensor] = {}
        if optimizer.state:  # Adagrad's constructor makes it.
            self.load_state_dict(optimizer.state_dict())
        self._hooks = [
            optimizer.register_step_pre_hook(self._step),
            optimizer.register_step_post_hook(self._show_gradients),
        ]

    def remove(self) -> None:
        """Let the optimizer step its parameters as a whole again."""
        for hook in self._hooks:
            hook.remove()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the whole state, of which this replica keeps its part, in its place."""
        likes: dict[Tensor, Tensor] = {
            parameter: self._place.like(parameter) for parameter in self._parameters()
        }
        divided = dict(state) if self._shards is None else self._shards.divided(state)
        with _substituted(self._optimizer, likes):
            self._optimizer.load_state_dict(divided)

    def _step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Step all buckets, and leave the optimizer's own step, which follows, nothing to do."""
        kwargs = closure_called(args, kwargs)
        finish = _nothing
        with torch.no_grad():
            for parameters in self._buckets():
                following = self._step_bucket(optimizer, parameters)
                finish()
                finish = following
            finish()
        self._await(list(self._parameters()))
        self._hide_gradients()
        return (optimizer,), kwargs

    def _step_bucket(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]
    ) -> Callable[[], None]:
        """Step some parameters; return what waits until they have their new values."""
        values = [self._taken(parameter.detach()) for parameter in parameters]
        gradients = [self._taken(p.grad) for p in parameters if p.grad is not None]
        self._place.await_copies(parameters)
        masters: dict[Tensor, Tensor] = {}
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            kept = optimizer.state[parameter].pop(MASTER, None)
            master = nn.Parameter(master_values(value, kept, self._place.dtype(value.dtype)))
            master.grad = gradient.to(master.dtype)
            masters[parameter] = master
        with _substituted(optimizer, masters), _without_hooks(optimizer):
            type(optimizer).step(optimizer)
        for parameter, value in zip(parameters, values, strict=True):
            master_value = masters[parameter].detach()
            if master_value.dtype != parameter.dtype:
                optimizer.state[parameter][MASTER] = master_value
                value.copy_(master_value)
        if self._shards is not None:
            return self._shards.gather_values(parameters, values)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value, non_blocking=True)
        return _nothing

    def _taken(self, tensor: Tensor) -> Tensor:
        """What this replica steps of a tensor, in the place of the state."""
        return self._place.take(tensor if self._shards is None else self._shards.part(tensor))

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

    def in_buckets(trial: Optimizer) -> None:
        BucketwiseOptimizer(trial, HostMemory(), bucket=1)

    for group in optimizer.param_groups:
        try:
            whole = trial_steps(optimizer, group)
            bucketwise = trial_steps(optimizer, group, prepare=in_buckets)
        except Exception as error:  # whatever the user's optimizer raises
            raise _cannot_offload(
                optimizer, f"a trial step on the CPU failed: {without_link(error)}"
            ) from error
        if not torch.allclose(whole, bucketwise):
            raise _cannot_offload(optimizer, "one parameter after the other gives other numbers")


def _cannot_offload(optimizer: Optimizer, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(optimizer).__name__} cannot be offloaded: {reason}. offload_optimizer=True steps "
        "parameters on the CPU, bucket by bucket: use AdamW, Adam, SGD, RMSprop, NAdam, Adagrad or "
        "the like, with their default `capturable=False`, or leave offload_optimizer out."
        + see("optimizers")
    )


def _nothing() -> None:
    """There is nothing to wait for."""


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
