"""Converts a parameter between all of it and the part of one rank of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_axosparse.distributed.gradient_reducer import DividedGradient
from lightning_axosparse.distributed.process_groups import all_gather, broadcast
from lightning_axosparse.pruning.rule import Stored
from lightning_axosparse.sparse.module.optimizer_state import expand_state, with_master
from lightning_axosparse.sparse.module.parameters import OwnedParameter, set_values
from lightning_axosparse.sparse.module.sparse_module import make_sparse
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm

T = TypeVar("T")


class SplitParameter:
    """A parameter of which each rank of a group has a part, along one dimension.

    Of one that is stored sparse each rank keeps the entries that are kept of its part.

    Args:
        entry: the parameter, whole, and its owners, which must read it plainly meanwhile.
        dimension: along which it is split.
        sizes: the length of each rank's part, of the whole dimension, or of each of its blocks of
            as many entries as all parts have; a rank may have nothing of it.
        group: the ranks.

    Attributes:
        entry: the parameter and its owners.
        shape: the dense shape of all of it.
        group: the ranks that have a part.
    """

    def __init__(
        self,
        entry: OwnedParameter,
        dimension: int,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self.entry, self.shape, self.group = entry, entry.shape, group
        self._dimension, self._sizes = dimension, list(sizes)
        self._blocks = entry.shape[dimension] // sum(sizes)

    def gather(self, optimizers: Iterable[Optimizer]) -> None:
        """Have all of it, its gradient and state on each rank; collective."""
        self._replace(*self.joining(), optimizers)

    def divide(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep this rank's part of it, its gradient and state."""
        self._replace(*self._converted(self._part), optimizers)

    def _replace(
        self,
        layout: Layout | None,
        converted: Callable[[Tensor], Tensor],
        optimizers: Iterable[Optimizer],
    ) -> None:
        parameter, form = self.entry.parameter, self.entry.form
        shape, gradient = parameter.shape, self.gradient()
        for optimizer in optimizers:
            state = self._agreed(optimizer.state.get(parameter, {}))
            if state:
                optimizer.state[parameter] = _with_shape(state, shape, converted)
        gradient = None if gradient is None else converted(gradient)
        set_values(parameter, converted(parameter.detach()), gradient)
        if layout is not None:
            assert form is not None
            for owner, attribute in self.entry.owners:
                made = DenseForm(form.dtype, backend=form.backend)
                made.policy = form.policy
                make_sparse(owner, attribute, layout, made)

    def joining(self) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
        """What makes all of a tensor of the parameter's shape, and its kept entries; collective."""
        return self._converted(self._joined)

    def _converted(
        self, redistributed: Callable[[Tensor], Tensor]
    ) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
        layout = self.entry.layout
        if layout is None:
            return None, redistributed
        made = layout_of(redistributed(layout.mask().to(torch.uint8)).bool())
        return made, lambda kept: made.compress(redistributed(layout.densify(kept)))

    def gradient(self) -> Tensor | None:
        """This rank's part of its gradient, also where it has nothing of it; collective.

        None if the replicas of any rank have divided theirs. Those of another may not have: the
        gradient of a part with few entries, as after pruning, is not worth dividing.
        """
        gradient = self.entry.parameter.grad
        divided = isinstance(gradient, DividedGradient)
        found = all_gather((divided, gradient is not None), self.group)
        if any(divided for divided, _ in found) or not any(has for _, has in found):
            return None
        return torch.zeros_like(self.entry.parameter) if gradient is None else gradient

    def _agreed(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its optimizer state, also where this rank has nothing of it; collective.

        An optimizer makes no state of a parameter that never gets a gradient.
        """
        part = self.entry.parameter
        kinds = self._of_owner(
            {k: v.dtype if _is_of(part.shape, v) else v for k, v in state.items()}
        )
        return {
            key: state.get(key, torch.empty_like(part, dtype=kind))
            if isinstance(kind, torch.dtype)
            else kind
            for key, kind in kinds.items()
        }

    def _of_owner(self, value: T) -> T:
        """The value of the rank that has all of it; of this one where each has a part."""
        owners = [rank for rank, size in enumerate(self._sizes) if size]
        if len(owners) == len(self._sizes):
            return value
        return broadcast(value, dist.get_global_rank(self.group, owners[0]), self.group)

    def dense(self) -> Tensor:
        """All of its values, dense; collective."""
        parameter = self.entry.parameter.detach()
        return self._joined(parameter if self.entry.layout is None else self.entry.dense())

    def dense_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """All of its optimizer state, dense, as checkpoints hold it; collective."""
        state = self._agreed(state)
        if self.entry.layout is None:
            return _with_shape(state, self.entry.parameter.shape, self._joined)
        state = expand_state(with_master(self.entry, state), self.entry.layout)
        return _with_shape(state, self.entry.layout.shape, self._joined)

    def stored(self, state: Mapping[str, Any]) -> Stored:
        """All of it as one process would have it; collective."""
        parameter = self.entry.parameter.detach()
        state, (layout, joined) = self._agreed(state), self.joining()
        return Stored(joined(parameter), _with_shape(state, parameter.shape, joined), layout)

    def local(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's parts of what has the whole shape."""
        return _with_shape(values, self.shape, self._part)

    def _part(self, whole: Tensor) -> Tensor:
        dim = self._dimension
        blocks = whole.unflatten(dim, (self._blocks, sum(self._sizes)))
        part: Tensor = blocks.split(self._sizes, dim + 1)[self.group.rank()].flatten(dim, dim + 1)
        return part.clone(memory_format=torch.contiguous_format)

    def _joined(self, part: Tensor) -> Tensor:
        dim, own = self._dimension, self._sizes[self.group.rank()]
        blocks = part.detach().unflatten(dim, (self._blocks, own))
        shapes = [list(blocks.shape) for _ in self._sizes]
        for shape, size in zip(shapes, self._sizes, strict=True):
            shape[dim + 1] = size
        parts = [part.new_empty(shape) for shape in shapes]
        dist.all_gather(parts, blocks.contiguous(), group=self.group)
        return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


def _is_of(shape: torch.Size, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _with_shape(
    state: Mapping[str, Any], shape: torch.Size, converted: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """A state in which tensors of a shape are converted."""
    return {
        key: converted(value) if _is_of(shape, value) else value for key, value in state.items()
    }
