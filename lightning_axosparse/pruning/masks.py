"""Stores masks at one bit an entry, and measures their distance.

The early-bird paper (You et al., ICLR 2020) takes the fraction of mask entries that differ, with
0.1 as the threshold, for channels pruned by up to 0.7. At higher ratios this distance says little:
two independent random masks of density 5% differ in 9.5% of their entries and would pass. By the
relative distance one threshold tells masks that settle from independent ones at every ratio.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_axosparse.distributed.process_groups import all_sum
from lightning_axosparse.support.arguments import validate_mask
from lightning_axosparse.support.files import CorruptFileError, stored_shape


class MaskBits(Mapping[str, Tensor]):
    """A mapping of names to bool tensors (on CPU), each unpacked when it is read."""

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
        present = [name for name in names if name in self._bits]
        part = MaskBits({})
        part._bits = {name: self._bits[name] for name in present}
        part.shapes = {name: self.shapes[name] for name in present}
        return part

    @staticmethod
    def merged(parts: Iterable[MaskBits]) -> MaskBits:
        """Return the masks of all ``parts``; the last one where a name occurs more than once."""
        merged = MaskBits({})
        for part in parts:
            merged._bits.update(part._bits)
            merged.shapes.update(part.shapes)
        return merged

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"bits": dict(self._bits), "shapes": shapes}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MaskBits:
        """Return the masks that :meth:`state_dict` described."""
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
    return torch.from_numpy(np.packbits(mask.detach().reshape(-1).cpu().numpy()))


Masks = Mapping[str, Tensor]


Distance = Literal["relative", "hamming"]
DISTANCES: tuple[Distance, ...] = ("relative", "hamming")


def mask_distance(
    distance: Distance,
    one: Masks,
    other: Masks,
    counted: Collection[str],
    group: ProcessGroup | None = None,
) -> float:
    """Return how far two sets of masks are apart; 0 for equal ones.

    Args:
        distance: "hamming": the fraction of all entries in which they differ, as in the paper; at
            pruning ratio p at most ``2 min(p, 1 - p)``. "relative": the fraction of unpruned
            entries that they do not have in common, ``1 - 2 |A and B| / (|A| + |B|)`` (one minus
            the Sorensen-Dice coefficient), divided by that of independent random masks of
            the same density, which are 1 apart in the mean.
        one: name -> bool tensor, False where an entry is pruned, of the parameters on this rank.
        other: the same names and shapes.
        counted: the names that this rank counts; each name is counted by exactly one rank of
            ``group``.
        group: the ranks whose stages make up the model; None if this rank has the full model.
    """
    counts = torch.zeros(3, dtype=torch.int64)
    for name in one.keys() & set(counted):
        a = one[name]
        b = other.get(name)
        if b is None or b.shape != a.shape:  # A hook has added or resized the weight.
            b = ~a
        counts += torch.tensor([int((a ^ b).sum()), int(a.sum() + b.sum()), a.numel()])
    differing, unpruned, entries = all_sum(counts, group).tolist()
    scale = entries if distance == "hamming" else unpruned * (1 - unpruned / max(1, 2 * entries))
    return float(differing / scale) if scale else 0.0
