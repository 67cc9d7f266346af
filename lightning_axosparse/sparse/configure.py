"""Configure: let optimizers be made for a module that is stored sparse already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.sparse.optimizer import compress_state
from lightning_axosparse.sparse.swap import owned_parameters, replace


@contextmanager
def dense_shapes(module: nn.Module) -> Iterator[list[Optimizer]]:
    """Give sparsely stored parameters their dense shapes, without the memory, for a while.

    ``configure_optimizers`` often tells matrices, which decay, from vectors, which do not, by their
    dimensions. Within, shapes are to be read and no entries.

    Args:
        module: the model, dense or (in part) stored sparse.

    Yields:
        A list for the optimizers made within: what state they begin with is compressed at the end.
    """
    stored = [
        (entry.parameter, entry.parameter.detach(), entry.layout)
        for entry in owned_parameters(module)
        if entry.layout is not None
    ]
    for parameter, values, layout in stored:
        replace(parameter, values.new_zeros(()).expand(layout.shape), None)
    made: list[Optimizer] = []
    try:
        yield made
    finally:
        for parameter, values, layout in stored:
            replace(parameter, values, None)
            for optimizer in made:
                if parameter in optimizer.state:
                    state = optimizer.state[parameter]
                    state.update(compress_state(state, layout))
