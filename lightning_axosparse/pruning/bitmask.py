"""Stores masks, bool tensors by name, at one bit per entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.support.arguments import validate_mask
from lightning_axosparse.support.corrupt_file import CorruptFileError, stored_shape


class MaskBits(Mapping[str, Tensor]):
    """A mapping of names to bool tensors (on CPU), each unpacked when it is read.

    Args:
        masks: name -> bool tensor, on any device.

    Raises:
        ValueError: if a mask is not a dense bool tensor, or is on the meta device.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        for name, mask in masks.items():
            validate_mask(name, mask)
        self._bits = {name: _pack(mask) for name, mask in masks.items()}
        self.shapes = {name: mask.shape for name, mask in masks.items()}
        """The shape of each mask."""

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        bits = np.unpackbits(self._bits[name].numpy(), count=shape.numel())
        return torch.from_numpy(bits).view(torch.bool).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MaskBits)
            and self.shapes == other.shapes
            and all(torch.equal(bits, other._bits[name]) for name, bits in self._bits.items())
        )

    def __repr__(self) -> str:
        return f"MaskBits({', '.join(f'{n}: {tuple(s)}' for n, s in self.shapes.items())})"

    def only(self, names: Iterable[str]) -> MaskBits:
        """Return the masks of those ``names`` that exist here, in the order of ``names``."""
        held = [name for name in names if name in self._bits]
        part = MaskBits({})
        part._bits = {name: self._bits[name] for name in held}
        part.shapes = {name: self.shapes[name] for name in held}
        return part

    @staticmethod
    def merged(parts: Iterable[MaskBits]) -> MaskBits:
        """Return the masks of all ``parts``; the last one where a name occurs more than once."""
        whole = MaskBits({})
        for part in parts:
            whole._bits.update(part._bits)
            whole.shapes.update(part.shapes)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"bits": dict(self._bits), "shapes": shapes}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MaskBits:
        """Return the masks that :meth:`state_dict` described.

        Raises:
            CorruptFileError: if the state is not as it was written.
        """
        masks = cls({})
        masks._bits = dict(state["bits"])
        masks.shapes = {
            name: stored_shape(shape, f"the mask of {name!r}")
            for name, shape in state["shapes"].items()
        }
        for name, shape in masks.shapes.items():
            bits, size = masks._bits.get(name), -(-shape.numel() // 8)
            fits = isinstance(bits, Tensor) and bits.dtype == torch.uint8 and bits.shape == (size,)
            if not fits or len(masks._bits) != len(masks.shapes):
                raise CorruptFileError(f"the mask of '{name}' does not have one bit per entry")
        return masks


def _pack(mask: Tensor) -> Tensor:
    flat = mask.detach().reshape(-1).cpu().numpy()
    return torch.from_numpy(np.packbits(flat))
