"""Divides an optimizer's state among replicas, each of which steps its part, bucket by bucket.

With ``shard_optimizer`` each of the N ranks that keep the same values of a parameter (the replicas
of a stage; of experts that are spread, those that have them) keeps the state of one N-th of its
elements, unless it is small, steps that share of each bucket, and gets the others' values by an
all-gather while the next bucket is stepped. Gradients have the same bits as without it; where
clipping, hooks or loggers do not see them before the step, each replica gets its share alone. The
methods are ZeRO stages 1 and 2 of Rajbhandari et al., SC 2020. A weight that is stored sparse is
the vector of its unpruned values, divided as any other.

As in AxoNN, the all-reduces that have not ended with the backward pass run while buckets whose
gradients are reduced are stepped, those of the last layers first; but not where clipping, loss
scaling or a hook reads all gradients before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.gradient_reducer import DividedGradient, own_part
from lightning_axosparse.pipeline.shard.remote_tensor import (
    RemoteTensor,
    closure_called,
    replaced_params,
)
from lightning_axosparse.sparse.module.optimizer_state import convert_state
from lightning_axosparse.support.patched import patched

if TYPE_CHECKING:  # It starts MPI, which one rank does without.
    from lightning_axosparse.distributed.mpi.process_group import MPIProcessGroup

BUCKET = 4_000_000
"""Elements that are stepped at a time."""
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


State = dict[str, Any]
"""What an optimizer keeps of one parameter."""

_ALIGNED = 64
"""Parts begin at multiples of so many elements, so that torch's vectorized loops, which compute the
rest behind the last full vectors otherwise, compute each element as in the whole parameter."""


class OptimizerShards:
    """This replica's part of an optimizer's state.

    Args:
        optimizer: the optimizer.
        replicas: the ranks that keep the same values of a parameter, of this rank; None for this
            one alone. They may change, as by moving to shorter pipelines.
    """

    def __init__(
        self, optimizer: Optimizer, replicas: Callable[[Tensor], dist.ProcessGroup | None]
    ) -> None:
        self._optimizer, self._replicas = optimizer, replicas

    def part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """The elements of a parameter's value, gradient or state that this replica steps.

        They are flat, and a view if the tensor is contiguous, unless it is not divided.
        """
        group = self._dividing(parameter)
        if group is None or isinstance(tensor, DividedGradient):
            return own_part(tensor)
        return _piece(tensor.reshape(-1), group, group.rank())

    def _dividing(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """The ranks that keep each a part of a parameter's state; None where this keeps it all."""
        group = self._replicas(parameter)
        is_small = group is None or parameter.numel() < group.size() * _ALIGNED
        return None if is_small else group

    def by_replicas(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Parameters that the same ranks keep, which have them in one order."""
        kinds: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault(self._replicas(parameter), []).append(parameter)
        return list(kinds.values())

    def own_state(self, parameter: Tensor, state: State) -> State:
        """The part that this replica keeps of the state of a parameter."""
        if self._dividing(parameter) is None:
            return state
        return convert_state(state, parameter.shape, lambda t: self.part(parameter, t).clone())

    def gather_values(
        self, parameters: Sequence[nn.Parameter], stepped: Sequence[Tensor]
    ) -> list[Callable[[], None]]:
        """Start to give the replicas each other's values of parameters; collective over them.

        Args:
            parameters: the parameters.
            stepped: what :meth:`part` gives of each, with the new values.

        Returns:
            Functions that wait until the parameters have the new values.
        """
        alike: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
        for index, parameter in enumerate(parameters):
            group = self._dividing(parameter)
            if group is not None:
                alike.setdefault((group, parameter.dtype), []).append(index)
        return [
            self._start_gather(
                [parameters[i].detach() for i in indices], [stepped[i] for i in indices], group
            )
            for (group, _), indices in alike.items()
        ]

    def _start_gather(
        self, tensors: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Callable[[], None]:
        """Start to fill tensors of one dtype with the parts of them of all ranks of a group."""
        flat = [tensor.reshape(-1) for tensor in tensors]  # copies where they are not contiguous
        pieces = [[_piece(each, group, rank) for rank in range(group.size())] for each in flat]
        work = cast("MPIProcessGroup", group).gather_parts(pieces, parts)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            for tensor, each in zip(tensors, flat, strict=True):
                if each.data_ptr() != tensor.data_ptr():
                    tensor.copy_(each.view(tensor.shape))

        return finish

    @contextmanager
    def whole_state(self, parameters: Sequence[nn.Parameter] | None = None) -> Iterator[None]:
        """Give each replica all of the state inside the context; collective over the replicas.

        Args:
            parameters: those whose state is wanted, which may change their shape inside; None takes
                those of the optimizer, which may be others at the end of the context.
        """
        self.make_whole(parameters)
        yield
        for parameter, state in self._states(parameters or self._own_parameters()):
            state.update(self.own_state(parameter, state))

    def make_whole(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Give each replica all of the state; collective over the replicas.

        Divided gradients, which the optimizer has stepped with, are given up.
        """
        parameters = self._own_parameters() if parameters is None else parameters
        _drop_divided(parameters)
        for parameter, state in self._states(parameters):
            state.update(self.whole(parameter, state))

    def drop(self) -> None:
        """Forget the state, of which no replica has all."""
        _drop_divided(self._own_parameters())
        self._optimizer.state.clear()

    def whole(self, parameter: Tensor, state: Mapping[str, Any]) -> State:
        """The whole state of a parameter, of which this is a part; collective over replicas."""
        group = self._dividing(parameter)
        if group is None:
            return dict(state)

        def gathered(part: Tensor) -> Tensor:
            whole = part.new_empty(parameter.shape)
            self._start_gather([whole], [part], group)()
            return whole

        part = self.part(parameter, parameter.detach())
        return convert_state(state, part.shape, gathered)

    def divided(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer with this replica's part of it alone."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return {
            **state,
            "state": {
                index: self.own_state(parameters[index], entry)
                for index, entry in state["state"].items()
            },
        }

    def _states(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, State]]:
        """Those of the parameters that have state, with it."""
        for parameter in parameters:
            if parameter in self._optimizer.state:
                yield parameter, self._optimizer.state[parameter]

    def _own_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank that the optimizer has."""
        every = (p for group in self._optimizer.param_groups for p in group["params"])
        return [parameter for parameter in every if not isinstance(parameter, RemoteTensor)]


def _drop_divided(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if isinstance(parameter.grad, DividedGradient):
            parameter.grad = None


def _piece(flat: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    """The part of a flat tensor that a replica keeps; that of the last ones may be shorter."""
    length = -(-flat.numel() // (group.size() * _ALIGNED)) * _ALIGNED
    return flat[length * rank : length * (rank + 1)]


class BucketwiseOptimizer:
    """Steps this replica's part of an optimizer's parameters, bucket by bucket.

    The optimizer stays the same object with the same parameters: they are the keys of its state,
    and clipping, loss scaling and hooks see them and their gradients. The numbers are the same to
    the bit as those of the same optimizer without buckets.

    Args:
        optimizer: the user's, configured.
        shards: which part of the state this replica keeps.
        await_gradients: waits until the gradients of the parameters it is given are reduced.
        bucket: elements that are stepped at a time; a larger parameter is a bucket of its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shards: OptimizerShards,
        await_gradients: Callable[[Sequence[nn.Parameter]], None] = lambda _: None,
        bucket: int = BUCKET,
    ) -> None:
        self._optimizer, self._shards = optimizer, shards
        self._await, self._bucket = await_gradients, bucket
        self._gradients: dict[nn.Parameter, Tensor] = {}
        if optimizer.state:  # Adagrad's constructor makes it.
            optimizer.load_state_dict(shards.divided(optimizer.state_dict()))
        self._hooks = [
            optimizer.register_step_pre_hook(self._step),
            optimizer.register_step_post_hook(self._show_gradients),
        ]

    def remove(self) -> None:
        """Let the optimizer step its parameters as a whole again."""
        for hook in self._hooks:
            hook.remove()

    def _step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Step all buckets, and leave the optimizer's own step, which follows, nothing to do."""
        kwargs = closure_called(args, kwargs)
        started: list[Callable[[], None]] = []
        with torch.no_grad():
            for parameters in self._buckets():
                following = self._step_bucket(optimizer, parameters)
                for finish in started:
                    finish()
                started = following
            for finish in started:
                finish()
        self._await(list(self._parameters()))
        self._hide_gradients()
        return (optimizer,), kwargs

    def _step_bucket(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]
    ) -> list[Callable[[], None]]:
        """Step some parameters; return what waits until they have their new values."""
        parts: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            part = nn.Parameter(self._shards.part(parameter, parameter.detach()))
            part.grad = self._shards.part(parameter, parameter.grad)
            parts[parameter] = part
        # Hooks belong to the whole step, not to a bucket's.
        before, after = (patched(optimizer, name, {}) for name in _HOOKS)
        with _substituted(optimizer, parts), before, after:
            type(optimizer).step(optimizer)
        return self._shards.gather_values(parameters, [each.detach() for each in parts.values()])

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """The buckets, each once its gradients are reduced; those of the last layers are first."""
        trained = [p for p in self._parameters() if p.grad is not None][::-1]
        # Ranks that keep other experts have the same buckets of what else they keep.
        kinds = self._shards.by_replicas(trained)
        for parameters in (each for kind in kinds for each in bucketed(kind, self._bucket)):
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


@contextmanager
def _substituted(optimizer: Optimizer, substitutes: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Give an optimizer some tensors, with the state, in place of its parameters; no others."""
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
