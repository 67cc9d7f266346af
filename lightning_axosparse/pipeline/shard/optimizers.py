"""Shards an optimizer's state: each replica steps its part of the parameters, bucket by bucket.

With ``shard_optimizer``, N ranks store the same values of a parameter: the replicas of a stage or,
for experts that are spread over replicas, those with the same experts. Each of them stores the
optimizer state of one N-th of the elements, unless the parameter is small. It steps this part of a
bucket, and gets the other parts by an all-gather while the next bucket is stepped. Gradients have
the same bits as without sharding; if clipping, hooks and loggers do not read them before the step,
each replica gets only its part. These are stages 1 and 2 of ZeRO (Rajbhandari et al., SC 2020). A
sparse weight is the vector of its unpruned values, divided as any other.

As in AxoNN, all-reduces that have not ended with the backward pass run while other buckets are
stepped, those of the last layers first; but not if clipping, loss scaling or a hook reads all
gradients before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.gradient_reducer import DividedGradient, local_part
from lightning_axosparse.pipeline.shard.remote_tensor import (
    RemoteTensor,
    call_closure,
    replaced_params,
)
from lightning_axosparse.sparse.module.optimizer_state import convert_state
from lightning_axosparse.support.patched import patched

if TYPE_CHECKING:  # It starts MPI, which is not needed on one rank.
    from lightning_axosparse.distributed.mpi.process_group import MPIProcessGroup

BUCKET = 4_000_000
"""Elements that are stepped at a time."""
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


State = dict[str, Any]
"""The state of one parameter in an optimizer."""

_ALIGNED = 64
"""Parts begin at multiples of this number of elements. So torch's vectorized loops, which compute
the elements after the last full vector differently, compute each as in the whole parameter."""


class OptimizerShards:
    """This replica's part of an optimizer's state.

    For example, two replicas store the state of elements 0 to 127 and 128 to 199 of a parameter
    with 200 elements; of one with less than 128 elements, each stores all of the state.

    Args:
        optimizer: the optimizer.
        replicas: returns the ranks that store the same values of a parameter as this one; None if
            there are no others. A regrid may change them.
    """

    def __init__(
        self, optimizer: Optimizer, replicas: Callable[[Tensor], dist.ProcessGroup | None]
    ) -> None:
        self.optimizer, self._replicas = optimizer, replicas

    def part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Return the elements of a parameter, its gradient or its state that this replica steps.

        They are flat, and a view if the tensor is contiguous; if the parameter is not divided, the
        tensor is returned.
        """
        group = self._shard_group(parameter)
        if group is None or isinstance(tensor, DividedGradient):
            return local_part(tensor)
        return _replica_part(tensor.reshape(-1), group, group.rank())

    def _shard_group(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """Return the ranks that divide the state of a parameter; None if it is not divided."""
        group = self._replicas(parameter)
        is_small = group is None or parameter.numel() < group.size() * _ALIGNED
        return None if is_small else group

    def group_by_replicas(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Group parameters by the ranks that store them, all of which have the same order."""
        by_replicas: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_replicas.setdefault(self._replicas(parameter), []).append(parameter)
        return list(by_replicas.values())

    def shard_state(self, parameter: Tensor, state: State) -> State:
        """Return this replica's part of the whole state of a parameter."""
        if self._shard_group(parameter) is None:
            return state
        return convert_state(state, parameter.shape, lambda t: self.part(parameter, t).clone())

    def gather_values(
        self, parameters: Sequence[nn.Parameter], stepped: Sequence[Tensor]
    ) -> list[Callable[[], None]]:
        """Start to all-gather the new values of parameters; collective over the replicas.

        Args:
            parameters: the parameters.
            stepped: this replica's :meth:`part` of each, with the new values.

        Returns:
            Functions that wait until the parameters have the new values.
        """
        by_gather: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
        for index, parameter in enumerate(parameters):
            group = self._shard_group(parameter)
            if group is not None:
                by_gather.setdefault((group, parameter.dtype), []).append(index)
        return [
            self._start_gather(
                [parameters[i].detach() for i in indices], [stepped[i] for i in indices], group
            )
            for (group, _), indices in by_gather.items()
        ]

    def _start_gather(
        self, tensors: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Callable[[], None]:
        """Start to fill tensors of one dtype with the parts from all ranks of a group."""
        flat = [tensor.reshape(-1) for tensor in tensors]  # copies where they are not contiguous
        pieces = [
            [_replica_part(each, group, rank) for rank in range(group.size())] for each in flat
        ]
        work = cast("MPIProcessGroup", group).gather_parts(pieces, parts)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            for tensor, each in zip(tensors, flat, strict=True):
                if each.data_ptr() != tensor.data_ptr():
                    tensor.copy_(each.view(tensor.shape))

        return finish

    @contextmanager
    def unsharded(self, parameters: Sequence[nn.Parameter] | None = None) -> Iterator[None]:
        """Gather the state on each replica inside the context; collective over the replicas.

        Args:
            parameters: those whose state is gathered, which may change their shape inside; None
                takes those of the optimizer, which may be others at the end of the context.
        """
        self.unshard(parameters)
        yield
        for parameter, state in self._states(parameters or self.local_parameters()):
            state.update(self.shard_state(parameter, state))

    def unshard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Gather the state on each replica; collective over the replicas.

        Divided gradients, with which the optimizer has already stepped, are dropped.
        """
        parameters = self.local_parameters() if parameters is None else parameters
        _drop_divided(parameters)
        for parameter, state in self._states(parameters):
            state.update(self.gather_state(parameter, state))

    def drop(self) -> None:
        """Drop the state."""
        _drop_divided(self.local_parameters())
        self.optimizer.state.clear()

    def gather_state(self, parameter: Tensor, state: Mapping[str, Any]) -> State:
        """Return the whole state of a parameter from its parts; collective over the replicas."""
        group = self._shard_group(parameter)
        if group is None:
            return dict(state)

        def gathered(part: Tensor) -> Tensor:
            whole = part.new_empty(parameter.shape)
            self._start_gather([whole], [part], group)()
            return whole

        part = self.part(parameter, parameter.detach())
        return convert_state(state, part.shape, gathered)

    def shard_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the optimizer with only this replica's part of the state."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {
            **state,
            "state": {
                index: self.shard_state(parameters[index], entry)
                for index, entry in state["state"].items()
            },
        }

    def _states(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, State]]:
        """Yield the parameters that have state, with their state."""
        for parameter in parameters:
            if parameter in self.optimizer.state:
                yield parameter, self.optimizer.state[parameter]

    def local_parameters(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters that this rank stores."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return [each for each in parameters if not isinstance(each, RemoteTensor)]


def _drop_divided(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if isinstance(parameter.grad, DividedGradient):
            parameter.grad = None


def _replica_part(flat: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    """Return a replica's part of a flat tensor; those of the last replicas may be shorter."""
    length = -(-flat.numel() // (group.size() * _ALIGNED)) * _ALIGNED
    return flat[length * rank : length * (rank + 1)]


class BucketwiseOptimizer:
    """Steps this replica's part of an optimizer's parameters, bucket by bucket.

    The optimizer remains the same object with the same parameters: they are the keys of its state,
    and clipping, loss scaling and hooks see them and their gradients. The numbers have the same
    bits as those of the same optimizer without buckets.

    Args:
        optimizer: the user's, configured.
        shards: this replica's part of the state.
        await_gradients: waits until the gradients of some parameters are reduced.
        bucket: elements that are stepped at a time; a larger parameter is a bucket of its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shards: OptimizerShards,
        await_gradients: Callable[[Sequence[nn.Parameter]], None] = lambda _: None,
        bucket: int = BUCKET,
    ) -> None:
        self._shards = shards
        self._await, self._bucket = await_gradients, bucket
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._attach(optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """Step an optimizer that a hook has put in the place of the last one."""
        if optimizer is not self._optimizer:
            self.remove()
            self._shards.optimizer = optimizer
            self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> None:
        self._optimizer, shards = optimizer, self._shards
        if optimizer.state:  # Adagrad's constructor creates it.
            optimizer.load_state_dict(shards.shard_state_dict(optimizer.state_dict()))
        self._hooks = [
            optimizer.register_step_pre_hook(self._step),
            optimizer.register_step_post_hook(self._show_gradients),
        ]

    def remove(self) -> None:
        """Let the optimizer step all parameters at once again."""
        for hook in self._hooks:
            hook.remove()

    def _step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Step all buckets; the optimizer's own step, which follows, gets no gradients."""
        kwargs = call_closure(args, kwargs)
        started: list[Callable[[], None]] = []
        with torch.no_grad():
            for parameters in self._buckets():
                following = self._step_bucket(optimizer, parameters)
                for finish in started:
                    finish()
                started = following
            for finish in started:
                finish()
        self._await(self._shards.local_parameters())
        self._hide_gradients()
        return (optimizer,), kwargs

    def _step_bucket(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]
    ) -> list[Callable[[], None]]:
        """Step some parameters; return functions that wait until they have their new values."""
        parts: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            part = nn.Parameter(self._shards.part(parameter, parameter.detach()))
            part.grad = self._shards.part(parameter, parameter.grad)
            parts[parameter] = part
        # Hooks are called once a step, not for each bucket.
        before, after = (patched(optimizer, name, {}) for name in _HOOKS)
        with _substituted(optimizer, parts), before, after:
            type(optimizer).step(optimizer)
        return self._shards.gather_values(parameters, [each.detach() for each in parts.values()])

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Yield each bucket once its gradients are reduced, those of the last layers first."""
        trained = [p for p in self._shards.local_parameters() if p.grad is not None][::-1]
        # Grouped, so that ranks with other experts have the same buckets of all other parameters.
        for group in self._shards.group_by_replicas(trained):
            for parameters in bucketed(group, self._bucket):
                self._await(parameters)
                # Only now it is known which gradients no rank has.
                yield [parameter for parameter in parameters if parameter.grad is not None]

    def _hide_gradients(self) -> None:
        for parameter in self._shards.local_parameters():
            if parameter.grad is not None:
                self._gradients[parameter] = parameter.grad
                parameter.grad = None

    def _show_gradients(self, *_: Any) -> None:
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients = {}


@contextmanager
def _substituted(optimizer: Optimizer, substitutes: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Replace an optimizer's parameters by some tensors, which get the state; omit all others."""
    for parameter, substitute in substitutes.items():
        _move_state(optimizer, parameter, substitute)
    try:
        with replaced_params(optimizer, substitutes.get):
            yield
    finally:
        for parameter, substitute in substitutes.items():
            _move_state(optimizer, substitute, parameter)


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
