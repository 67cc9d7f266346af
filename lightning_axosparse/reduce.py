"""Reduce: the all-reduce of whatever the parameters now are, started as gradients become final.

Gradients travel in flat buckets. A bucket is sent as soon as the last of its gradients is final,
while the rest of the backward pass goes on; afterwards ``param.grad`` is a view of the bucket. What
a sparse parameter sends is its kept entries, because they are the parameter (SAMO, Singh & Bhatele,
IPDPS 2023), so nothing here knows of sparsity.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.blocks import Blocks
from lightning_axosparse.timing import clock

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Share:
    """Parameters whose gradients are summed over the same ranks.

    Args:
        group: the ranks that hold these parameters: those of one stage over all replicas, and of
            several stages for parameters that stages share.
        parameters: in the same order on every rank of the group.
    """

    group: dist.ProcessGroup
    parameters: Sequence[nn.Parameter]


@dataclass(frozen=True)
class _Terms:
    """What a gradient that is reduced is made of.

    Attributes:
        replicas: number that the sum over ranks is divided by.
        factor: number that the gradients of this batch are multiplied by.
        earlier: gradients of earlier batches that are still to be added.
    """

    replicas: int
    factor: float
    earlier: MutableMapping[nn.Parameter, Tensor | None]

    def total(self, parameter: nn.Parameter) -> Tensor | None:
        fresh, earlier = parameter.grad, self.earlier.get(parameter)
        if earlier is not None:
            self.earlier[parameter] = None
            return earlier if fresh is None else torch.add(earlier, fresh, alpha=self.factor)
        return fresh if fresh is None or self.factor == 1 else fresh * self.factor


@dataclass
class _Bucket:
    group: dist.ProcessGroup
    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    flat: Tensor | None = None
    work: Any = None

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    def pack_and_send(self, terms: _Terms, blocks: Blocks) -> int:
        """Copy the gradients' shares into one block, start its all-reduce, return its bytes."""
        first = self.parameters[0]
        self.flat = blocks.lend((sum(self.sizes),), first.dtype, first.device)
        for parameter, piece in zip(self.parameters, self.flat.split(self.sizes), strict=True):
            gradient = terms.total(parameter)
            if gradient is None:
                piece.zero_()
            else:
                torch.div(gradient.reshape(-1), terms.replicas, out=piece)
                parameter.grad = piece.view_as(gradient)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)
        return self.flat.numel() * self.flat.element_size()


class GradientReducer:
    """Averages gradients over replicas, and sums those of shared parameters over stages.

    Args:
        shares: the parameters of this rank by the ranks that they are shared with.
        replicas: number by which the sums are divided.
    """

    def __init__(self, shares: Sequence[Share], replicas: int) -> None:
        self.reduced_bytes = 0
        """Bytes of gradients handed to the all-reduce in the last step."""
        self._shares = shares
        self.parameters = {parameter for share in shares for parameter in share.parameters}
        """The parameters of this rank that other ranks hold, too."""
        self._terms = _Terms(replicas, 1.0, {})
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._sizes: list[list[int]] = []
        self._blocks = Blocks()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks.values():
            hook.remove()

    def arm(
        self,
        factor: float = 1.0,
        earlier: MutableMapping[nn.Parameter, Tensor | None] | None = None,
    ) -> None:
        """From now on a gradient is final once it has been accumulated.

        Args:
            factor: what this batch's gradients are to be multiplied by.
            earlier: gradients of earlier batches to add to them; None is put in their place.
        """
        self.reduced_bytes = 0
        self._terms = replace(
            self._terms, factor=factor, earlier={} if earlier is None else earlier
        )
        self._buckets = [bucket for share in self._shares for bucket in _buckets(share)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        sizes = [bucket.sizes for bucket in self._buckets]
        if sizes != self._sizes:
            self._sizes, self._blocks = sizes, Blocks()
        # Parameters may be unfrozen at any time, and a frozen one takes no hook.
        for parameter in self._bucket_of.keys() - self._hooks.keys():
            hook = parameter.register_post_accumulate_grad_hook(self._on_final)
            self._hooks[parameter] = hook

    def finish(self) -> None:
        """Send what is left and wait until every gradient is reduced."""
        self.send_rest()
        self.wait_for(list(self._bucket_of))

    def send_rest(self) -> None:
        """Send what is left; ``param.grad`` is where the average will be, once it is waited for."""
        self._send(self._buckets)
        with clock.span("all-reduce"):
            used = self._used_anywhere()
        for bucket in self._buckets:
            assert bucket.flat is not None
            pieces = bucket.flat.split(bucket.sizes)
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape) if used[parameter] else None
        self._buckets = []

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until the gradients of these parameters, which have been sent, are reduced."""
        with clock.span("all-reduce"):
            for parameter in parameters:
                bucket = self._bucket_of.get(parameter)
                if bucket is not None:
                    bucket.work.wait()
                    for arrived in bucket.parameters:
                        del self._bucket_of[arrived]

    def _on_final(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        bucket.missing.discard(parameter)
        # All ranks of a group have to start its collectives in one order.
        ready = []
        for other in self._buckets:
            if other.group is bucket.group:
                if other.missing:
                    break
                ready.append(other)
        self._send(ready)

    def _send(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            if bucket.work is None:
                self.reduced_bytes += bucket.pack_and_send(self._terms, self._blocks)

    def _used_anywhere(self) -> dict[nn.Parameter, bool]:
        """Which parameters have a gradient on any rank; the others keep None, as on one process."""
        used: dict[nn.Parameter, bool] = {}
        for share in self._shares:
            trained = [p for p in share.parameters if p.requires_grad]
            if not trained:
                continue
            flags = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
            flags = flags.to(trained[0].device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=share.group)
            used.update(zip(trained, flags.bool().tolist(), strict=True))
        return used


def _buckets(share: Share) -> list[_Bucket]:
    """Fill buckets from the last parameter to the first: the order of the backward pass."""
    open_buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    size: dict[int, int] = {}
    buckets = []
    for parameter in reversed(share.parameters):
        if not parameter.requires_grad:
            continue
        key = parameter.dtype, parameter.device
        bucket = open_buckets.get(key)
        size_bytes = parameter.numel() * parameter.element_size()
        if bucket is None or size[id(bucket)] + size_bytes > BUCKET_BYTES:
            bucket = open_buckets[key] = _Bucket(share.group, [])
            size[id(bucket)] = 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.missing.add(parameter)
        size[id(bucket)] += size_bytes
    return buckets
