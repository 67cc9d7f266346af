"""Base class of tickets: saves them, and reads them from files and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_axosparse.pruning.bitmask import MaskBits
from lightning_axosparse.support import archive
from lightning_axosparse.support.arguments import PATH, Kind, check, checked
from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.troubleshooting import see


class TicketFile:
    """A frozen dataclass with masks, which are stored at one bit an entry, and plain fields.

    Attributes:
        masks: name -> bool tensor, True for what is kept.
        distances: number of optimizer steps -> distance of the masks after them to earlier ones.
    """

    kind: ClassVar[str]
    """What it is called in errors."""

    form: ClassVar[str]
    """The format that this version writes and reads: a name, a slash and a number."""

    kinds: ClassVar[Mapping[str, Kind]]
    """What each field has to be."""

    masks: Mapping[str, Tensor]
    distances: Mapping[int, float]

    def __post_init__(self) -> None:
        for name, value in check(ValueError, vars(self), self.kinds).items():
            object.__setattr__(self, name, value)
        if not isinstance(self.masks, MaskBits):
            object.__setattr__(self, "masks", MaskBits(self.masks))
        object.__setattr__(self, "distances", dict(self.distances))

    @property
    def packed(self) -> MaskBits:
        """The masks as they are stored."""
        assert isinstance(self.masks, MaskBits)
        return self.masks

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        return {"format": self.form, **self._record()}

    def _record(self) -> dict[str, Any]:
        """Return the fields, as plain containers."""
        return {**vars(self), "masks": self.packed.state_dict()}

    @classmethod
    def is_state(cls, value: object) -> bool:
        """Return whether ``value`` came from :meth:`state_dict`, of any version."""
        name = cls.form.partition("/")[0]
        return isinstance(value, Mapping) and str(value.get("format")).startswith(f"{name}/")

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the ticket that :meth:`state_dict` described.

        Raises:
            CorruptFileError: if the state is not as it was written, or is of another version.
        """
        if state["format"] != cls.form:
            raise CorruptFileError(
                f"it is a {state['format']}, but this version of lightning_axosparse reads "
                f"{cls.form}"
            )
        return cls._from_record({key: state[key] for key in state if key != "format"})

    @classmethod
    def _from_record(cls, fields: dict[str, Any]) -> Self:
        return cls(**{**fields, "masks": MaskBits.from_state_dict(fields["masks"])})

    @classmethod
    def in_checkpoint(cls, checkpoint: Mapping[str, Any]) -> Self | None:
        """Return the ticket that a callback saved in a Lightning checkpoint, if any."""
        for state in checkpoint.get("callbacks", {}).values():
            if isinstance(state, Mapping) and cls.is_state(state.get("ticket")):
                return cls.from_state_dict(state["ticket"])
        return None

    @checked(ValueError, path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ticket to a file, at about one bit per entry of its masks."""
        archive.save(self.state_dict(), path)

    @classmethod
    @checked(ValueError, path=PATH)
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a ticket from a file that :meth:`save` wrote, or from a Lightning checkpoint.

        Raises:
            FileNotFoundError: if there is no such file.
            CorruptFileError: if the file is not as it was written, or has no such ticket.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no file '{path}'." + see("files"))
        archive.check(path)
        with reading(path):
            content = torch.load(path, map_location="cpu", weights_only=True)
            if cls.is_state(content):
                return cls.from_state_dict(content)
            ticket = cls.in_checkpoint(content)
            if ticket is None:
                raise CorruptFileError(f"it has no {cls.kind}")
            return ticket
