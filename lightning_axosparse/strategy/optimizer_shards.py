"""Divides the optimizer state of a stage among its replicas (ZeRO stage 1).

Each of N replicas keeps the state of one N-th of the elements of every parameter but the smallest,
and steps those; the others get their values by an all-gather. Gradients are all-reduced as
without it, so that clipping, hooks and loggers see what they see on one process. The method is that
of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020. A weight that is stored sparse is the vector of its kept values, divided as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard.remote_tensor import RemoteTensor
from lightning_axosparse.sparse.module.elementwise import trial_steps
from lightning_axosparse.support.troubleshooting import see, without_link

State = dict[str, Any]
"""What an optimizer keeps of one parameter."""

_ALIGNED = 64
"""Parts begin at multiples of so many elements, so that torch's vectorized loops, which compute the
rest behind the last full vectors otherwise, compute each element as in the whole parameter."""


class OptimizerShards:
    """This replica's part of an optimizer's state.

    Args:
        optimizer: the optimizer, whose parameters are the same on all replicas.
        group: the replicas of this stage; a function, as moving to shorter pipelines changes them.
    """

    def __init__(self, optimizer: Optimizer, group: Callable[[], dist.ProcessGroup | None]) -> None:
        self._optimizer, self._find_group = optimizer, group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The replicas of this stage; None if there is one."""
        return self._find_group()

    def part(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor that this replica steps, flat: a view if it is contiguous."""
        group = self.group
        if group is None or not self._divides(tensor.shape):
            return tensor
        pieces = _pieces(tensor.reshape(-1), group)
        return pieces[dist.get_rank(group)]

    def _divides(self, shape: torch.Size) -> bool:
        """Whether each replica keeps a part of a tensor of that shape, and not all of it."""
        return self.group is not None and shape.numel() >= self.group.size() * _ALIGNED

    def own_state(self, state: State, shape: torch.Size) -> State:
        """The part that this replica keeps of the state of a parameter of that shape."""
        if not self._divides(shape):
            return state
        return {
            key: self.part(value).clone()
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for key, value in state.items()
        }

    def gather_values(
        self, parameters: Sequence[nn.Parameter], stepped: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to give the replicas each other's values of parameters; collective over them.

        Args:
            parameters: the parameters.
            stepped: this replica's part of each, with the new values.

        Returns:
            A function that waits until the parameters have the new values.
        """
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(parameters):
            if self._divides(parameter.shape):
                by_dtype.setdefault(parameter.dtype, []).append(index)
            else:
                parameter.copy_(stepped[index])
        started = [
            self._start_gather(
                [parameters[i].detach() for i in indices], [stepped[i] for i in indices]
            )
            for indices in by_dtype.values()
        ]

        def finish() -> None:
            for each in started:
                each()

        return finish

    def _start_gather(
        self, tensors: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to fill tensors of one dtype with all replicas' parts of them."""
        group = self.group
        assert group is not None
        size, first = group.size(), tensors[0]
        longest = [_longest(tensor, group) for tensor in tensors]
        mine = first.new_zeros(sum(longest))
        for room, part in zip(mine.split(longest), parts, strict=True):
            room[: part.numel()].copy_(part)
        whole = mine.new_empty(size * mine.numel())
        work = dist.all_gather_single(whole, mine, group=group, async_op=True)

        def finish() -> None:
            work.wait()
            blocks = whole.view(size, -1).split(longest, dim=1)
            for tensor, block in zip(tensors, blocks, strict=True):
                _fill(tensor, block, group)

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
        for parameter in self._own() if parameters is None else parameters:
            if parameter in self._optimizer.state:
                state = self._optimizer.state[parameter]
                state.update(self.own_state(state, parameter.shape))

    def make_whole(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Give each replica all of the state; collective over the replicas."""
        for parameter in self._own() if parameters is None else parameters:
            if parameter in self._optimizer.state:
                state = self._optimizer.state[parameter]
                state.update(self.whole(parameter, state))

    def drop(self) -> None:
        """Forget the state, of which no replica has all."""
        self._optimizer.state.clear()

    def whole(self, parameter: Tensor, state: Mapping[str, Any]) -> State:
        """The whole state of a parameter, of which this is a part; collective over replicas."""
        whole, part = dict(state), self.part(parameter.detach())
        for key, value in state.items() if self._divides(parameter.shape) else ():
            if isinstance(value, Tensor) and value.shape == part.shape:
                whole[key] = value.new_empty(parameter.shape)
                self._start_gather([whole[key]], [value])()
        return whole

    def divided(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer with this replica's part of it alone."""
        indexed = (p for group in self._optimizer.param_groups for p in group["params"])
        shapes = dict(enumerate(parameter.shape for parameter in indexed))
        return {
            **state,
            "state": {
                index: self.own_state(entry, shapes[index])
                for index, entry in state["state"].items()
            },
        }

    def _own(self) -> list[nn.Parameter]:
        groups = self._optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        return [p for p in parameters if not isinstance(p, RemoteTensor)]


def validate_divisible_optimizers(optimizer: Optimizer) -> None:
    """Check that an optimizer steps parts of its parameters as it steps them whole.

    This takes trial steps of an optimizer of the same class and settings on small random
    parameters; the optimizer itself is not changed.

    Raises:
        MisconfigurationException: if the numbers differ, or a step fails, as for LAMB, Adafactor
            and Muon, which look at whole parameters.
    """
    for group in optimizer.param_groups:
        try:
            whole = trial_steps(optimizer, group)
            in_parts = trial_steps(optimizer, group, in_parts=True)
        except Exception as error:  # whatever the user's optimizer raises
            raise _not_divisible(
                optimizer, f"a trial step failed: {without_link(error)}"
            ) from error
        if not torch.allclose(whole, in_parts):
            raise _not_divisible(optimizer, "parts of a parameter get other numbers than all of it")


def _not_divisible(optimizer: Optimizer, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"The state of {type(optimizer).__name__} cannot be divided: {reason}. "
        "shard_optimizer=True gives each replica a part of every parameter: use AdamW, Adam, SGD, "
        "RMSprop, NAdam, Adagrad or the like, or leave shard_optimizer out." + see("optimizers")
    )


def _longest(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """How many elements the first replicas have of a tensor; the last ones may have fewer."""
    blocks = -(-tensor.numel() // (group.size() * _ALIGNED))
    return blocks * _ALIGNED


def _pieces(flat: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The parts of a flat tensor, one for each replica."""
    longest, size = _longest(flat, group), group.size()
    starts = [min(flat.numel(), longest * rank) for rank in range(size + 1)]
    return [flat[start:end] for start, end in pairwise(starts)]


@torch.no_grad()
def _fill(tensor: Tensor, block: Tensor, group: dist.ProcessGroup) -> None:
    """Fill a tensor with the parts of all replicas, which are the rows of ``block``."""
    flat = tensor.reshape(-1)  # a copy if it is not contiguous
    for piece, row in zip(_pieces(flat, group), block, strict=True):
        piece.copy_(row[: piece.numel()])
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
