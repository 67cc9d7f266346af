"""Stands in for a reduced gradient of which this replica keeps a part alone (ZeRO stage 2).

The part is all that the optimizer of this replica needs. Whoever else reads such a gradient, after
the optimizer's step, is told what to do, instead of getting numbers of a part or none.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import no_torch_function
from lightning_axosparse.support.troubleshooting import see


class DividedGradient(Tensor):
    """A gradient with the shape of its parameter, but without values to read.

    Attributes:
        part: the elements that this replica keeps, 1-D.
    """

    part: Tensor

    def __new__(cls, part: Tensor, shape: torch.Size) -> DividedGradient:
        """Stand in for a gradient of that shape."""
        gradient: DividedGradient = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device
        )
        gradient.part = part
        return gradient

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> NoReturn:
        """Raise, whatever the operator."""
        raise RuntimeError(
            "With shard_optimizer=True, replicas divide the gradients once these are reduced, "
            "unless something reads them before the optimizer steps. Read them in the hooks "
            "`on_after_backward` or `on_before_optimizer_step` of the module or of a callback, "
            "which get whole ones, or leave shard_optimizer out." + see("optimizers")
        )


def kept(gradient: Tensor) -> Tensor:
    """What this replica keeps of a gradient: all of it, or its part."""
    return gradient.part if isinstance(gradient, DividedGradient) else gradient
