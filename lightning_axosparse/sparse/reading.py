"""Reading: how a module reads a sparsely stored weight: in which dtype, and from what.

With the policy "samo" (SAMO; Singh & Bhatele, IPDPS 2023) the dense weight that products read stays
in memory, in the dtype that they run in: it is made once an optimizer step, where the policy
"sparse" makes it, in parts, at every use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_axosparse.sparse.layout import Layout

Policy = Literal["sparse", "samo"]
POLICIES: tuple[str, ...] = get_args(Policy)


def best_policy(sixteen_bit: bool, passes: int) -> Policy:
    """The policy that ``benchmarks/overhead`` recommends.

    A resident copy saves what every forward and backward pass after the first would spend on making
    the weight. In float32 that is little, and the copy takes 4 bytes a weight; in 16 bits it is
    much, and the copy takes 2.

    Args:
        sixteen_bit: whether products run in bfloat16 or float16.
        passes: forward and backward passes, micro-batches, between two steps of the optimizer.
    """
    return "samo" if sixteen_bit and passes > 1 else "sparse"


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the kept values of a weight that reads as ``dtype``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on ``device``; None while it is off, and on the meta device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@dataclass(eq=False)
class Reading:
    """How the modules that share one parameter read it.

    Attributes:
        dtype: what the weight reads as. Its kept values are of this or a wider one.
        resident: the dense copy that stays; None with the policy "sparse".
    """

    dtype: torch.dtype
    resident: Resident | None = None

    @property
    def policy(self) -> Policy:
        """What is kept between uses."""
        return "sparse" if self.resident is None else "samo"

    @policy.setter
    def policy(self, policy: Policy) -> None:
        if policy != self.policy:
            self.resident = Resident() if policy == "samo" else None

    def move(self, dtype: torch.dtype) -> None:
        """Read as ``dtype`` from now on; the values may have moved to another device."""
        self.dtype = dtype
        if self.resident is not None:
            self.resident.drop()

    def of(self, values: Tensor, training: bool) -> Reading:
        """How to read ``values``, which a functional call may have put in the parameter's place.

        Only the parameter itself has a resident copy, which is told here what it is to be; not one
        of inference mode, whose changes nobody counts.
        """
        if self.resident is None or torch.compiler.is_compiling():
            return Reading(self.dtype)
        if not isinstance(values, nn.Parameter) or values.is_inference() or values.is_meta:
            return Reading(self.dtype)
        autocast = None if self.dtype == torch.float64 else autocast_dtype(values.device)
        self.resident.serve(autocast or self.dtype, training)
        return self


class Resident:
    """The dense copy of one weight, in one dtype, filled anew once kept values may have changed.

    They may have when their version has, when any optimizer has stepped (fused ones count no
    version), and when a module goes over to evaluation or back (averaged weights may come and go
    through ``.data``, which counts none either).

    Attributes:
        dtype: the dtype of the copy; None before the first read.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self._training = True
        self._dense: Tensor | None = None
        self._source: Tensor | None = None
        self._filled_at = (-1, -1)

    def serve(self, dtype: torch.dtype, training: bool) -> None:
        """Be of ``dtype`` from now on, filled anew where that or ``training`` changes."""
        if dtype != self.dtype:
            self.dtype, self._dense = dtype, None
        if training != self._training:
            self._training, self._source = training, None

    def whole(self, kept: Tensor, layout: Layout) -> Tensor:
        """The dense weight of which ``kept`` are the entries that ``layout`` keeps; not to be kept.

        Args:
            kept: shape ``(layout.nnz,)``, of any dtype.
            layout: where they lie.
        """
        state = kept._version, _steps.taken
        source = self._source
        if self._dense is None or source is None or source.data_ptr() != kept.data_ptr():
            self._filled_at = (-1, -1)
        if state != self._filled_at:
            if self._dense is None:
                # A tensor made in inference mode could not be written outside it.
                with torch.inference_mode(False):
                    self._dense = torch.empty(layout.shape, dtype=self.dtype, device=kept.device)
            layout.fill(self._dense, kept)
            # Held, so that no other values can come to lie at its address; the parameter itself
            # would take up the address of other data it is given.
            self._source, self._filled_at = kept.detach(), state
        assert self._dense is not None
        return self._dense

    def drop(self) -> None:
        """Free the memory until the next use."""
        self._dense = self._source = None

    @property
    def dense(self) -> Tensor | None:
        """The memory that is held."""
        return self._dense

    def __reduce__(self) -> Any:
        return Resident, ()


class _Steps:
    """Counts the steps of all optimizers of this process."""

    def __init__(self) -> None:
        self.taken = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.taken += 1


_steps = _Steps()
