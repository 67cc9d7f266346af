"""Counts the bytes of weights, indices, gradients and optimizer state in this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.divided_gradient import DividedGradient
from lightning_axosparse.sparse.module.parameters import owned_parameters
from lightning_axosparse.support.torch_internals import storage_id, tree_leaves


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state by kind.

    Attributes:
        weights: the parameters.
        resident: the dense copies of sparsely stored weights (policy "samo").
        indices: the positions of kept entries.
        gradients: the gradients.
        optimizer: the optimizer state.
    """

    weights: int
    resident: int
    indices: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.weights + self.resident + self.indices + self.gradients + self.optimizer


def state_bytes(module: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    """Return the bytes of ``module``'s parameters, their gradients and optimizer state.

    Storage that several tensors share counts once. Parameters on the meta device and buffers do not
    count.

    Args:
        module: a model, dense or (in part) stored sparse.
        optimizer: the optimizer whose state counts, if there is one.
    """
    parameters = list(module.parameters())
    owned = owned_parameters(module)
    layouts = [entry.layout for entry in owned if entry.layout is not None]
    copies = [entry.form.copy for entry in owned if entry.form is not None]
    counted: set[int] = set()
    return StateBytes(
        weights=_new_bytes(parameters, counted),
        resident=_new_bytes((c.dense for c in copies if c and c.dense is not None), counted),
        indices=_new_bytes((t for layout in layouts for t in layout.tensors.values()), counted),
        gradients=_new_bytes((p.grad for p in parameters if p.grad is not None), counted),
        optimizer=_new_bytes(
            (
                leaf
                for state in (optimizer.state.values() if optimizer else ())
                for leaf in tree_leaves(state)
                if isinstance(leaf, Tensor)
            ),
            counted,
        ),
    )


def _new_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Return the bytes of the storages not yet in ``counted``, and add these to it."""
    total = 0
    for tensor in chain.from_iterable(map(_components, tensors)):
        storage = tensor.untyped_storage()
        if storage_id(storage) not in counted:
            counted.add(storage_id(storage))
            total += storage.nbytes()
    return total


def _components(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with storage of their own that ``tensor`` consists of."""
    if isinstance(tensor, DividedGradient):
        return (tensor.part,)
    if tensor.is_meta:
        return ()
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
