"""Packed masks: bool tensors by name, kept at one bit an entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.arguments import refuse_mask
from lightning_axosparse.checksum import verified, with_checksum
from lightning_axosparse.corrupt import CorruptFileError


class PackedMasks(Mapping[str, Tensor]):
    """A mapping of names to bool tensors (on CPU) that are unpacked only as they are read.

    Args:
        masks: name -> bool tensor, on any device.

    Raises:
        ValueError: for a mask that is no dense bool tensor, or on the meta device.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        for name, mask in masks.items():
            refuse_mask(name, mask)
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
            isinstance(other, PackedMasks)
            and self.shapes == other.shapes
            and all(torch.equal(bits, other._bits[name]) for name, bits in self._bits.items())
        )

    def __repr__(self) -> str:
        return f"PackedMasks({', '.join(f'{n}: {tuple(s)}' for n, s in self.shapes.items())})"

    def only(self, names: Iterable[str]) -> PackedMasks:
        """Those of ``names`` that are here, in the order of ``names``."""
        held = [name for name in names if name in self._bits]
        part = PackedMasks({})
        part._bits = {name: self._bits[name] for name in held}
        part.shapes = {name: self.shapes[name] for name in held}
        return part

    @staticmethod
    def merged(parts: Iterable[PackedMasks]) -> PackedMasks:
        """All masks of all ``parts``; of equal names the last."""
        whole = PackedMasks({})
        for part in parts:
            whole._bits.update(part._bits)
            whole.shapes.update(part.shapes)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        return with_checksum(
            {
                "bits": dict(self._bits),
                "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            }
        )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> PackedMasks:
        """The masks that :meth:`state_dict` described.

        Raises:
            CorruptFileError: if they have changed.
        """
        fields = verified(state, "masks")
        masks = cls({})
        masks._bits = dict(fields["bits"])
        masks.shapes = {name: torch.Size(shape) for name, shape in fields["shapes"].items()}
        for name, shape in masks.shapes.items():
            bits = masks._bits.get(name)
            size = -(-shape.numel() // 8)
            if bits is None or bits.dtype != torch.uint8 or bits.shape != (size,):
                raise CorruptFileError(f"the mask of '{name}' has not one bit an entry")
        return masks


def _pack(mask: Tensor) -> Tensor:
    flat = mask.detach().reshape(-1).cpu().numpy()
    return torch.from_numpy(np.packbits(flat))
