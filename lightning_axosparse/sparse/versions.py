"""Versions: whether kept values are still those that a forward pass has read.

Autograd counts the changes of a tensor, and checks the count of what it saved itself; kept values
are not among that, because the parameter stays anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_axosparse.sparse.layout import Layout


@dataclass(slots=True)
class Seen:
    """The version of the kept values that one read of a weight, and every view of it, has seen."""

    version: int


def version_of(values: Tensor) -> int:
    """How often ``values`` changed; what was made in inference mode does not count it."""
    return 0 if values.is_inference() else values._version


def check_unchanged(values: Tensor, version: int, layout: Layout) -> None:
    """Refuse to go on with kept values that are no longer those that were read.

    Raises:
        RuntimeError: if their version is not ``version`` any more.
    """
    if version_of(values) != version:
        raise RuntimeError(
            f"The kept values of a sparse weight of shape {tuple(layout.shape)} were changed in "
            "place after the forward pass that read it and before the backward pass that needs it "
            "again. Step the optimizer, load weights or change them only after backward."
        )
