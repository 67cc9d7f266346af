"""Writing: in-place operators on a sparse weight, whose kept entries take what was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from lightning_axosparse.sparse.versions import version_of

if TYPE_CHECKING:
    from lightning_axosparse.sparse.weight import SparseWeight

Kind = TypeVar("Kind", bound=Tensor)


def mapped(function: Callable[[Kind], Any], value: Any, kind: type[Kind]) -> Any:
    """Replace every ``kind`` in an operator's arguments or result; cheaper than a pytree map."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item, kind) for item in value)
    return value


def written_by(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[Kind]
) -> list[Kind]:
    """The tensors of ``kind`` among the arguments that ``func`` changes in place."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    changed = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, kind)]


def write_through(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    written: Sequence[SparseWeight],
    kind: type[SparseWeight],
) -> Any:
    """Run an in-place operator on dense copies and keep what it wrote to the kept entries."""
    bases = {id(weight): weight._whole() for weight in written}
    copies = {id(weight): weight._strided(bases[id(weight)]) for weight in written}

    def dense(weight: SparseWeight) -> Tensor:
        return copies[id(weight)] if id(weight) in copies else weight.dense()

    plain = {name: mapped(dense, value, kind) for name, value in kwargs.items()}
    result = func(*mapped(dense, args, kind), **plain)
    for weight in written:
        weight.kept.copy_(weight.entries.compress(bases[id(weight)]))
        if not weight.kept.is_inference():  # operators in here count no version
            increment_version(weight.kept)
        weight._seen.version = version_of(weight.kept)
    originals = {id(copies[id(weight)]): weight for weight in written}
    return mapped(lambda tensor: originals.get(id(tensor), tensor), result, Tensor)
