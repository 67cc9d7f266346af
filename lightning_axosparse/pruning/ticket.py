"""Defines the ticket: the masks of the weights to keep, and how they were found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.pruning.bitmask import MaskBits
from lightning_axosparse.pruning.densities import SCOPES
from lightning_axosparse.support import archive
from lightning_axosparse.support.arguments import (
    FRACTION,
    INDEX,
    MASKS,
    NONE,
    NOT_NEGATIVE,
    PATH,
    TEXT,
    Kind,
    check,
    checked,
    one_of,
)
from lightning_axosparse.support.checksum import verified, with_checksum
from lightning_axosparse.support.corrupt_file import CorruptFileError, reading

_FIELDS = {
    "masks": MASKS,
    "pruning_ratio": FRACTION,
    "score": TEXT | NONE,
    "scope": one_of(*SCOPES, "given"),
    "step": INDEX | NONE,
    "distance": one_of("relative", "overlap", "hamming"),
    "distances": Kind(
        "a mapping of optimizer steps to distances",
        lambda value: (
            isinstance(value, Mapping)
            and all(INDEX.fits(step) for step in value)
            and all(NOT_NEGATIVE.fits(distance) for distance in value.values())
        ),
    ),
}
_KIND = "lightning_axosparse.Ticket/"
_FORMAT = f"{_KIND}3"


@dataclass(frozen=True, repr=False)
class Ticket:
    """A winning ticket: which weights to keep (You et al., ICLR 2020).

    Attributes:
        masks: parameter name -> bool tensor of its shape, True where an entry is kept. Any mapping
            may be given; each mask is stored at one bit per entry and unpacked (on CPU) when read.
        pruning_ratio: the fraction of entries that was to be pruned.
        score: by what the entries were ranked: "magnitude", "saliency" or the name of a function;
            None if the ticket was made by hand.
        scope: how the weights shared what is kept, as for ``EarlyBirdTicket``; "given" if densities
            were.
        step: number of optimizer steps before the draw; None if the ticket was made by hand.
        distance: how ``distances`` were measured: "relative", "overlap" or "hamming".
        distances: number of optimizer steps -> the largest distance of the masks after them to
            those of the window, up to the draw.

    Raises:
        ValueError: if a field has the wrong type or is out of range.
    """

    masks: Mapping[str, Tensor]
    pruning_ratio: float
    score: str | None = None
    scope: str = "global"
    step: int | None = None
    distance: str = "relative"
    distances: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in check(ValueError, vars(self), _FIELDS).items():
            object.__setattr__(self, name, value)
        if not isinstance(self.masks, MaskBits):
            object.__setattr__(self, "masks", MaskBits(self.masks))
        object.__setattr__(self, "distances", dict(self.distances))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each pruned parameter."""
        return dict(self._packed.shapes)

    def part(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return the masks of those ``names`` that are pruned."""
        return self._packed.only(names)

    def layer_sparsity(self) -> dict[str, float]:
        """Return the fraction of entries pruned in each parameter."""
        return {name: 1 - float(mask.float().mean()) for name, mask in self.masks.items()}

    @property
    def sparsity(self) -> float:
        """The fraction of entries pruned, over all pruned parameters."""
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        return 1 - kept / max(1, sum(shape.numel() for shape in self.shapes.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        fields = {name: value for name, value in vars(self).items() if name != "masks"}
        return with_checksum({"format": _FORMAT, "masks": self._packed.state_dict(), **fields})

    @staticmethod
    def is_state(value: object) -> bool:
        """Return whether ``value`` came from :meth:`state_dict`, of any version."""
        return isinstance(value, Mapping) and str(value.get("format")).startswith(_KIND)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Ticket:
        """Return the ticket that :meth:`state_dict` described.

        Raises:
            CorruptFileError: if the state is not as it was written, or is of another version.
        """
        if state["format"] != _FORMAT:
            raise CorruptFileError(
                f"it is a {state['format']}, but this version of lightning_axosparse reads "
                f"{_FORMAT}"
            )
        fields = verified(state, "the ticket")
        del fields["format"]
        return cls(MaskBits.from_state_dict(fields.pop("masks")), **fields)

    @checked(ValueError, path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ticket to a file, at about one bit per weight."""
        archive.save(self.state_dict(), path)

    @classmethod
    @checked(ValueError, path=PATH)
    def load(cls, path: str | os.PathLike[str]) -> Ticket:
        """Read a ticket that :meth:`save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            CorruptFileError: if the file is not as it was written, or is not a ticket.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no ticket file '{path}'.")
        archive.check(path)
        with reading(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            if not cls.is_state(state):
                raise CorruptFileError("it is not a ticket, which Ticket.save writes")
            return cls.from_state_dict(state)

    def __repr__(self) -> str:
        return (
            f"Ticket({len(self.masks)} parameters, {self.sparsity:.1%} of "
            f"{sum(shape.numel() for shape in self.shapes.values())} entries pruned, "
            f"score={self.score!r}, scope={self.scope!r}, step={self.step})"
        )

    @property
    def _packed(self) -> MaskBits:
        assert isinstance(self.masks, MaskBits)
        return self.masks
