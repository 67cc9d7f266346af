"""Tells by their sizes which dimensions of tensors are those of samples.

The same code makes tensors of the whole batch and of its micro-batches. A dimension that does not
grow with them is not that of the samples: it may be that of classes or of experts. One that does
has entries of samples, also where it joins their tokens. Code is the same if the same instruction
of the user's has called, by the frames of the call.
"""

from __future__ import annotations

import re
import sys
from types import CodeType, FrameType

from torch import Tensor

_OURS = re.compile(rf"{__name__.partition('.')[0]}\.(?!examples\.)")
"""The modules of this package; those of the examples are as a user's."""

_Place = tuple[CodeType, int, int, int]
"""The instruction that has called a function, the number of its tensor, and the dimension."""


class SampleDims:
    """The sizes that dimensions have had, for micro-batches of several sizes.

    Attributes:
        samples: how many the micro-batch has whose step runs.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._others: set[_Place] = set()
        """Those that had another size than there were samples."""
        self._sizes: dict[_Place, dict[int, set[int]]] = {}
        """By the number of samples."""
        self._varying: set[_Place] = set()
        self._asked = 0

    def begin_call(self) -> None:
        """Begin with the tensors of a function."""
        self._asked = 0

    def of(self, tensor: Tensor) -> list[int]:
        """The dimensions of a tensor that may have one entry for each sample."""
        found = []
        for dim, place in enumerate(self._places(tensor)):
            if tensor.shape[dim] != self.samples:
                self._others.add(place)
            if place not in self._others:
                found.append(dim)
        return found

    def is_of_samples(self, tensor: Tensor) -> bool:
        """Whether a tensor has values of each sample, or of parts of samples such as tokens.

        While it has been seen of micro-batches of one size alone, this is assumed of a dimension
        that has a multiple of their samples.
        """
        is_found = False
        for dim, place in enumerate(self._places(tensor)):
            size, sizes = tensor.shape[dim], self._sizes.setdefault(place, {})
            others = [seen for samples, seen in sizes.items() if samples != self.samples]
            if others and not any(size in seen for seen in others):
                self._varying.add(place)
            sizes.setdefault(self.samples, set()).add(size)
            may_be = not others and size % self.samples == 0
            is_found |= may_be or place in self._varying
        return is_found

    def _places(self, tensor: Tensor) -> list[_Place]:
        if not tensor.dim():
            return []
        caller, asked = users_frame(sys._getframe(1)), self._asked
        self._asked += 1
        return [(caller.f_code, caller.f_lasti, asked, dim) for dim in range(tensor.dim())]


def is_ours(caller: FrameType | None) -> bool:
    """Whether code of this package has called a function, besides other modes that hand it on."""
    while caller is not None and caller.f_code.co_name == "__torch_function__":
        caller = caller.f_back
    if caller is None:
        return False
    return _OURS.match(str(caller.f_globals.get("__name__"))) is not None


def users_frame(caller: FrameType) -> FrameType:
    """The innermost frame of a call that is neither of this package nor of torch."""
    while caller.f_back is not None:
        package = str(caller.f_globals.get("__name__")).partition(".")[0]
        if package != "torch" and not is_ours(caller):
            break
        caller = caller.f_back
    return caller
