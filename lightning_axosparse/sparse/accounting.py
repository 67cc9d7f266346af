"""Accounting: how many bytes of model state this process holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_axosparse.sparse.swap import owned_parameters


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state, by what they hold.

    ``resident``: the dense copies of sparsely stored weights that stay (policy "samo").
    """

    weights: int
    resident: int
    indices: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them together."""
        return self.weights + self.resident + self.indices + self.gradients + self.optimizer


def state_bytes(module: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    """What the parameters of ``module``, their gradients and optimizer state take, in bytes.

    Storage that several tensors share counts once, parameters on the meta device count nothing,
    buffers are left out.

    Args:
        module: a model, dense or (in part) stored sparse.
        optimizer: the optimizer whose state counts, if there is one.
    """
    parameters = list(module.parameters())
    owned = owned_parameters(module)
    layouts = [entry.layout for entry in owned if entry.layout is not None]
    residents = [entry.reading.resident for entry in owned if entry.reading is not None]
    counted: set[int] = set()
    return StateBytes(
        weights=_new_bytes(parameters, counted),
        resident=_new_bytes((r.dense for r in residents if r and r.dense is not None), counted),
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
    """The bytes of the storages not yet in ``counted``, which are added to it."""
    total = 0
    for tensor in chain.from_iterable(map(_held, tensors)):
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total


def _held(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with storage of their own that make up ``tensor``."""
    if tensor.is_meta:
        return ()
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
