"""Averages gradients over data-parallel ranks, bucket by bucket during the backward pass.

A bucket is a flat tensor of several gradients. Its all-reduce starts as soon as the last of its
gradients is final, while the rest of the backward pass goes on; afterwards ``param.grad`` is a view
of the bucket. Behind the gradients, a bucket has one number per parameter: 1 if the rank has a
gradient, else 0. A sum of 0 means that no rank has one, and ``param.grad`` becomes None.

A sparse parameter consists of its unpruned values (SAMO, Singh & Bhatele, IPDPS 2023), as does its
gradient, so this module needs no code for sparsity.

If replicas divide the optimizer's state, each may need only its part of a gradient. Then gradients
are reduce-scattered, and the memory of the bucket is free for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.distributed.mpi.shared_memory import BlockPool
from lightning_axosparse.support.torch_internals import no_torch_function
from lightning_axosparse.support.trace import clock
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:  # It starts MPI, which one rank does without.
    from lightning_axosparse.distributed.mpi.process_group import MPIProcessGroup

BUCKET_BYTES = 25 * 2**20


class DividedGradient(Tensor):
    """Stands for a reduced gradient of which this replica has only a part (ZeRO stage 2).

    The optimizer of this replica needs only the part. Any other code that reads the gradient gets
    an error that says what to do.

    Attributes:
        part: the elements that this replica has, 1-D.
    """

    part: Tensor

    def __new__(cls, part: Tensor, shape: torch.Size) -> DividedGradient:
        """Create a tensor of the gradient's shape, without its elements."""
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
            "which get full gradients, or leave shard_optimizer out." + see("optimizers")
        )


def local_part(gradient: Tensor) -> Tensor:
    """Return the part of a gradient that this replica keeps, or all of one that is not divided."""
    return gradient.part if isinstance(gradient, DividedGradient) else gradient


@dataclass(frozen=True)
class ReductionGroup:
    """Parameters whose gradients are summed over the same ranks.

    Args:
        group: the ranks that have these parameters: those of one stage in all replicas, or of
            several stages for parameters that these stages share.
        parameters: the parameters, in the same order on every rank of the group.
    """

    group: dist.ProcessGroup
    parameters: Sequence[nn.Parameter]


@dataclass(eq=False)
class _Bucket:
    group: dist.ProcessGroup
    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    sparse: set[nn.Parameter] = field(default_factory=set)
    nbytes: int = 0
    used: Tensor | None = None
    work: Any = None

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    def await_reduced(self) -> None:
        """Wait for the reduction; parameters that no rank has used get None, as on one process."""
        assert self.used is not None
        self.work.wait()
        for parameter, ranks in zip(self.parameters, self.used.tolist(), strict=True):
            if not ranks:
                parameter.grad = None
            elif parameter in self.sparse and type(parameter.grad) is Tensor:
                parameter.grad = parameter.grad.to_sparse(1)  # As SparseAdam takes it.
        self.used = self.work = None


Part = Callable[[nn.Parameter, Tensor], Tensor]
"""Returns this rank's part of a parameter's flat gradient, as a view."""


class GradientReducer:
    """Averages gradients over replicas, and sums those of shared parameters over stages.

    Args:
        groups: the parameters of this rank that other ranks have, too, with these ranks.
        divisor: number by which the sums over ranks are divided: the data-parallel size.
        part: selects this rank's part of each reduced gradient; None for all of it.
    """

    def __init__(
        self, groups: Sequence[ReductionGroup], divisor: int, part: Part | None = None
    ) -> None:
        self.part = part
        self.accumulated: set[nn.Parameter] = set()
        """Parameters with gradients of earlier batches, which may be frozen by now."""
        self.reduced_bytes = 0
        """Bytes of gradients that were all-reduced in the last step."""
        self.parameters = {parameter for group in groups for parameter in group.parameters}
        """The parameters of this rank that other ranks have, too."""
        self._groups, self._divisor = groups, divisor
        self._earlier: MutableMapping[nn.Parameter, Tensor | None] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._deferred: Collection[nn.Parameter] = ()
        self._sizes: list[list[int]] = []
        self._longest = 0
        self._pool = BlockPool()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()

    def prepare(
        self,
        earlier: MutableMapping[nn.Parameter, Tensor | None] | None = None,
        deferred: Collection[nn.Parameter] = (),
    ) -> None:
        """Prepare for the last backward pass of a step, whose gradients are final.

        Args:
            earlier: gradients of earlier batches to add to them; each is replaced by None when it
                has been added.
            deferred: parameters whose gradients are final only after :meth:`mark_final`.
        """
        self.reduced_bytes, self._deferred = 0, deferred
        self._earlier = {} if earlier is None else earlier
        self._buckets = [
            bucket for group in self._groups for bucket in _buckets(group, self.accumulated)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        sizes = [bucket.sizes for bucket in self._buckets]
        if sizes != self._sizes:
            self._sizes, self._pool = sizes, BlockPool()
            self._longest = max((sum(each) + len(each) for each in sizes), default=0)
        # Parameters may be unfrozen at any time, and a frozen one takes no hook.
        for parameter in self._bucket_of.keys() - self._hooks.keys():
            if not parameter.requires_grad:
                continue
            hook = parameter.register_post_accumulate_grad_hook(self._on_accumulated)
            self._hooks[parameter] = hook

    def finish(self, waits: bool = True) -> None:
        """Start the remaining all-reduces, and wait until every gradient is reduced.

        Args:
            waits: False leaves the waiting to :meth:`wait_for`. Until then ``param.grad`` is the
                memory where the average will be, also where no rank has a gradient.
        """
        self._start(self._buckets)
        self.accumulated.clear()
        if waits:
            self.wait_for(list(self._bucket_of))

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for the all-reduces of these parameters, which must have started."""
        with clock.span("all-reduce"):
            for parameter in parameters:
                bucket = self._bucket_of.get(parameter)
                if bucket is not None:
                    bucket.await_reduced()
                    for reduced in bucket.parameters:
                        del self._bucket_of[reduced]

    def _on_accumulated(self, parameter: nn.Parameter) -> None:
        if parameter not in self._deferred:
            self.mark_final(parameter)

    def mark_final(self, parameter: nn.Parameter) -> None:
        """Mark a parameter's gradient as final, and start the all-reduces that can start."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        bucket.missing.discard(parameter)
        # All ranks of a group have to start its collectives in the same order.
        ready = []
        for other in self._buckets:
            if other.group is bucket.group:
                if other.missing:
                    break
                ready.append(other)
        self._start(ready)

    def _start(self, buckets: Sequence[_Bucket]) -> None:
        self._buckets = [bucket for bucket in self._buckets if bucket not in buckets]
        for bucket in buckets:
            self.reduced_bytes += bucket.nbytes
            self._pack_and_start(bucket)
            if self.part is not None:
                self._free_reduced()

    def _pack_and_start(self, bucket: _Bucket) -> None:
        """Copy the gradients of a bucket into one flat tensor, and start to reduce it."""
        first, sizes, part = bucket.parameters[0], bucket.sizes, self.part
        size = sum(sizes) + len(sizes)
        # Equally large blocks, so that the next bucket can use the block of any that is done.
        room = size if part is None else max(size, self._longest)
        flat = self._pool.empty((room,), first.dtype, first.device)[:size]
        *pieces, used = flat.split([*sizes, len(sizes)])
        has_gradient = []
        for parameter, piece in zip(bucket.parameters, pieces, strict=True):
            gradient = self._total(parameter)
            has_gradient.append(gradient is not None)
            if gradient is None:
                piece.zero_()
            else:
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                    bucket.sparse.add(parameter)
                torch.div(gradient.reshape(-1), self._divisor, out=piece)
        used.copy_(torch.tensor(has_gradient))
        if part is None:
            bucket.used, reduced = used, pieces
            bucket.work = dist.all_reduce(flat, group=bucket.group, async_op=True)
        else:
            parts = [part(p, piece) for p, piece in zip(bucket.parameters, pieces, strict=True)]
            parts.append(used)
            lengths = [each.numel() for each in parts]
            own = self._pool.empty((sum(lengths),), first.dtype, first.device)
            *reduced, bucket.used = own.split(lengths)
            bucket.work = cast("MPIProcessGroup", bucket.group).reduce_parts(
                [*reduced, bucket.used], parts, flat
            )
        for parameter, piece in zip(bucket.parameters, reduced, strict=True):
            is_full = piece.numel() == parameter.numel()
            shape = parameter.shape
            parameter.grad = piece.view(shape) if is_full else DividedGradient(piece, shape)

    def _total(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, with that of earlier batches added."""
        gradient, earlier = parameter.grad, self._earlier.get(parameter)
        if earlier is None:
            return gradient
        self._earlier[parameter] = None
        return earlier if gradient is None else earlier + gradient

    def _free_reduced(self) -> None:
        """Free the memory of buckets whose all-reduce is done."""
        for bucket in dict.fromkeys(self._bucket_of.values()):
            if bucket.work is not None and bucket.work.is_completed():
                self.wait_for(bucket.parameters)


def _buckets(group: ReductionGroup, accumulated: Collection[nn.Parameter]) -> list[_Bucket]:
    """Fill buckets from the last parameter to the first, as the backward pass roughly does."""
    open_buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    buckets = []
    for parameter in reversed(group.parameters):
        if not (parameter.requires_grad or parameter in accumulated):
            continue
        key = parameter.dtype, parameter.device
        bucket = open_buckets.get(key)
        if bucket is None or bucket.nbytes + parameter.nbytes > BUCKET_BYTES:
            bucket = open_buckets[key] = _Bucket(group.group, [])
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        if parameter.requires_grad:
            bucket.missing.add(parameter)
        bucket.nbytes += parameter.nbytes
    return buckets
