"""Requirements: what a model has to have for EarlyBirdTicket."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse.pruning.masks import prunable
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.swap import layouts


def refuse_model(module: nn.Module, exclude: Sequence[str], ticket: Ticket | None) -> None:
    """Refuse a model that the patterns, the ticket or pruning itself do not fit.

    Args:
        module: the model, dense or sparse.
        exclude: patterns of the names of parameters to leave dense.
        ticket: what is to be adopted; None where one is to be found.

    Raises:
        MisconfigurationException: naming the pattern or the parameter.
    """
    names = [name for name, _ in module.named_parameters()]
    for pattern in exclude:
        _check(
            any(fnmatchcase(name, pattern) for name in names),
            f"exclude pattern '{pattern}' matches no parameter. There are: {_few(names)}.",
        )
    if ticket is not None:
        _refuse_ticket(ticket, module)
    else:
        _check(
            bool(prunable(module, exclude)),
            "There is nothing to prune: no floating parameter with two or more dimensions is left "
            f"after exclude={tuple(exclude)}.",
        )


def _refuse_ticket(ticket: Ticket, module: nn.Module) -> None:
    """Refuse a ticket whose names or shapes are not those of ``module``."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    shapes.update({name: layout.shape for name, layout in layouts(module).items()})
    unknown = [name for name in ticket.shapes if name not in shapes]
    _check(
        not unknown,
        f"The ticket prunes parameters that the model does not have: {_few(unknown)}. The model "
        f"has: {_few(list(shapes))}.",
    )
    for name, shape in ticket.shapes.items():
        _check(
            shape == shapes[name],
            f"The ticket's mask of '{name}' has shape {tuple(shape)}, the parameter "
            f"{tuple(shapes[name])}: it was drawn from another model.",
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check(right: bool, message: str) -> None:
    if not right:
        raise MisconfigurationException(message)
