"""Defines a tensor whose values are made only when it is written to a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import no_torch_function, tree_map_only


class DeferredTensor(Tensor):
    """Stands for a tensor by its shape and dtype, on the meta device.

    :func:`lightning_axosparse.support.files.archive.save` writes it as the tensor that it stands
    for.

    Args:
        key: of the tensor, unique in its checkpoint.
        shape: of the tensor.
        dtype: of the tensor.
        make: returns the tensor, of what is stored; called when it is written, and not kept.
        stored: what ``make`` takes, and what may change until then.
    """

    key: str
    make: Callable[..., Tensor]
    stored: tuple[Tensor, ...]

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls,
        key: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        make: Callable[..., Tensor],
        *stored: Tensor,
    ) -> DeferredTensor:
        """Make the tensor without its values."""
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        tensor.key, tensor.make, tensor.stored = key, make, stored
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def made(self) -> Tensor:
        """The tensor that it stands for, on CPU."""
        return self.make(*self.stored).cpu()

    def copied(self) -> DeferredTensor:
        """One that stands for the present values, whatever is stored later."""
        copies = (tensor.detach().to("cpu", copy=True) for tensor in self.stored)
        return DeferredTensor(self.key, self.shape, self.dtype, self.make, *copies)


def all_made(tree: Any) -> Any:
    """The tree with every deferred tensor made; one that is there twice is made once."""
    return tree_map_only(DeferredTensor, each_once(DeferredTensor.made), tree)


def each_once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache ``function`` by the identity of its argument, which must stay alive: tied stay one."""
    results: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if id(value) not in results:
            results[id(value)] = function(value)
        return results[id(value)]

    return once
