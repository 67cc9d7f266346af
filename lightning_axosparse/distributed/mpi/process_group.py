"""Implements torch.distributed with MPI: the backend "mpi4py", its collectives and messages."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from mpi4py import MPI
from torch import Tensor
from torch.distributed import AllreduceOptions, FileStore, HashStore, PrefixStore, Store, TCPStore

from lightning_axosparse.distributed.collective_results import collective
from lightning_axosparse.distributed.mpi.environment import placement
from lightning_axosparse.distributed.mpi.node_collectives import node_collectives
from lightning_axosparse.distributed.mpi.work import (
    ChainedWork,
    MPIWork,
    ReduceOperation,
    copy_all_back,
    copy_back,
    empty_for,
    flat,
    raw,
    split_back,
)
from lightning_axosparse.distributed.rank_status import blocked
from lightning_axosparse.support.torch_internals import tensors_in, tree_map_only
from lightning_axosparse.support.troubleshooting import see

NAME = "mpi4py"


def _nccl_for_cuda(method: Callable[..., MPIWork]) -> Any:
    """Run the operation by MPI; with CUDA tensors, the NCCL operation of the same name."""

    @functools.wraps(method)
    def run(self: MPIProcessGroup, *args: Any, **kwargs: Any) -> Any:
        outputs = tensors_in(args[:1])
        with torch.no_grad():
            work = collective(lambda: start(self, *args, **kwargs), outputs)
        return work or MPIWork((), outputs)

    def start(self: MPIProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_in(args)):
            return getattr(self.nccl, method.__name__)(*args, **kwargs)
        with torch.no_grad():
            work = method(self, *tree_map_only(Tensor, Tensor.detach, args), **kwargs)
            work.describe(f"`{method.__name__}` ({self._desc}) of {self._members}")
            return self._started(work)

    return run


class MPIProcessGroup(dist.ProcessGroup):
    """The ranks of one MPI communicator as a torch.distributed process group.

    The methods and their arguments are those that torch.distributed calls. NCCL connects the ranks
    through the store.
    """

    def __init__(self, communicator: MPI.Intracomm, store: Store) -> None:
        # The type stubs have only the constructor with a store, which no Python subclass may call.
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._comm = communicator
        self._store = store
        self._members = _describe_members(communicator)
        self._node = node_collectives(communicator)
        self._pending: set[MPIWork] = set()
        self._name = self._desc = ""

    # The base class stores name and description in C++ backends, of which this group has none.

    @property
    def group_name(self) -> Any:
        """The name that torch.distributed gave this group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The purpose of the group, in words."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @functools.cached_property
    def nccl(self) -> dist.ProcessGroup:
        """The NCCL group of the same ranks; created on first use, by all of them."""
        kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
        group = dist.ProcessGroup(self._store, self.rank(), self.size())
        group._set_default_backend(kind)
        store = PrefixStore("cuda/", self._store)
        nccl = dist.ProcessGroupNCCL(
            store, self.rank(), self.size(), dist.ProcessGroupNCCL.Options()
        )
        group._register_backend(device, kind, nccl)
        return group

    def getBackendName(self) -> str:
        """The name under which torch.distributed knows this backend."""
        return "mpi4py"

    def shutdown(self) -> None:
        """Complete the pending operations and free the communicator; called by all its ranks."""
        for work in list(self._pending):
            work.wait()
        if self._node is not None:  # Other ranks may still read the counters of this one.
            MPIWork([self._comm.Ibarrier()]).wait()
        if "nccl" in vars(self):
            self.nccl.shutdown()
        self._comm.Free()

    def _started(self, work: MPIWork) -> MPIWork:
        # Kept here, as buffers must exist until the operation is done, also if the caller drops it.
        for other in list(self._pending):
            other.is_completed()
        work.keep_in(self._pending)
        return work

    @_nccl_for_cuda
    def allreduce(self, tensors: list[Tensor], opts: Any) -> MPIWork:
        """Reduce each tensor over all ranks, in its own memory if possible."""
        if self._node is not None and self._node.suits(tensors, opts.reduceOp):
            return self._node.all_reduce(tensors)
        reduction = ReduceOperation(opts.reduceOp, self.size())
        buffers = [reduction.stage(tensor) for tensor in tensors]
        requests = [
            self._comm.Iallreduce(MPI.IN_PLACE, buffer.numpy(), reduction.operation(tensor.dtype))
            for buffer, tensor in zip(buffers, tensors, strict=True)
        ]
        return MPIWork(requests, tensors, buffers, lambda: reduction.copy_back(buffers, tensors))

    @_nccl_for_cuda
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """Do the same as :meth:`allreduce`."""
        return self.allreduce(tensors, opts)

    @_nccl_for_cuda
    def reduce(self, tensors: list[Tensor], opts: Any) -> MPIWork:
        """Reduce a tensor over all ranks into the root's."""
        reduction = ReduceOperation(opts.reduceOp, self.size())
        (tensor,), root = tensors, opts.rootRank
        buffer, operation = reduction.stage(tensor), reduction.operation(tensor.dtype)
        if self.rank() != root:
            return MPIWork(
                [self._comm.Ireduce(buffer.numpy(), None, operation, root)], tensors, [buffer]
            )
        request = self._comm.Ireduce(MPI.IN_PLACE, buffer.numpy(), operation, root)
        return MPIWork([request], tensors, [buffer], lambda: reduction.copy_back([buffer], tensors))

    @_nccl_for_cuda
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> MPIWork:
        """Reduce the r-th tensor of each list over all ranks into rank r's output."""
        reduction = ReduceOperation(opts.reduceOp, self.size())
        sources = [reduction.stage(flat(parts)) for parts in inputs]
        buffers = [
            source.new_empty(output.numel())
            for source, output in zip(sources, outputs, strict=True)
        ]
        requests = [
            self._comm.Ireduce_scatter(
                source.numpy(),
                buffer.numpy(),
                [part.numel() for part in parts],
                reduction.operation(parts[0].dtype),
            )
            for source, buffer, parts in zip(sources, buffers, inputs, strict=True)
        ]
        return MPIWork(
            requests,
            outputs,
            [*sources, *buffers],
            lambda: reduction.copy_back(buffers, outputs),
        )

    @_nccl_for_cuda
    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        """Reduce the r-th slice of each input into rank r's output."""
        parts = [list(source.reshape(-1).chunk(self.size())) for source in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    @_nccl_for_cuda
    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [source], opts)

    @_nccl_for_cuda
    def broadcast(self, tensors: list[Tensor], opts: Any) -> MPIWork:
        """Copy the root's tensors to all ranks."""
        buffers = [tensor.contiguous() for tensor in tensors]
        requests = [self._comm.Ibcast(raw(buffer), opts.rootRank) for buffer in buffers]
        return MPIWork(requests, tensors, buffers, lambda: copy_all_back(buffers, tensors))

    @_nccl_for_cuda
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> MPIWork:
        """Collect each rank's tensor into a list on every rank."""
        if self._node is not None:
            return self._node.exchange(list(zip(*outputs, strict=True)), [inputs])
        sources = [source.contiguous() for source in inputs]
        buffers = [empty_for(parts) for parts in outputs]
        requests = [
            self._comm.Iallgatherv(raw(source), raw(buffer, parts))
            for source, buffer, parts in zip(sources, buffers, outputs, strict=True)
        ]

        def finish() -> None:
            for buffer, parts in zip(buffers, outputs, strict=True):
                split_back(buffer, parts)

        return MPIWork(requests, tensors_in(outputs), [*sources, *buffers], finish)

    @_nccl_for_cuda
    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> MPIWork:
        """Collect each rank's tensor into one tensor on every rank."""
        if self._node is not None and all(output.is_contiguous() for output in outputs):
            pieces = [output.view(-1).tensor_split(self.size()) for output in outputs]
            by_rank = list(zip(*pieces, strict=True))
            return self._node.exchange(by_rank, [[each.reshape(-1) for each in inputs]])
        # Copied, as a source may be this rank's piece of the output, which MPI does not allow.
        sources = [each.clone(memory_format=torch.contiguous_format) for each in inputs]
        buffers = [output.contiguous() for output in outputs]
        requests = [
            self._comm.Iallgather(raw(source), raw(buffer))
            for source, buffer in zip(sources, buffers, strict=True)
        ]
        return MPIWork(
            requests, outputs, [*sources, *buffers], lambda: copy_all_back(buffers, outputs)
        )

    @_nccl_for_cuda
    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [source])

    @_nccl_for_cuda
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MPIWork:
        """Collect each rank's tensor into a list on the root."""
        source, root = inputs[0].contiguous(), opts.rootRank
        if self.rank() != root:
            return MPIWork([self._comm.Igatherv(raw(source), None, root)], (), [source])
        buffer = empty_for(outputs[0])
        request = self._comm.Igatherv(raw(source), raw(buffer, outputs[0]), root)
        return MPIWork(
            [request], outputs[0], [source, buffer], lambda: split_back(buffer, outputs[0])
        )

    @_nccl_for_cuda
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MPIWork:
        """Send each rank its tensor of the root's list."""
        buffer, root = outputs[0].contiguous(), opts.rootRank
        source = flat(inputs[0]) if self.rank() == root else None
        message = None if source is None else raw(source, inputs[0])
        request = self._comm.Iscatterv(message, raw(buffer), root)
        return MPIWork([request], outputs, [source, buffer], lambda: copy_back(buffer, outputs[0]))

    @_nccl_for_cuda
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        """Send the r-th tensor to rank r, and receive likewise."""
        if self._node is not None:
            return self._node.exchange([[o] for o in outputs], [[i] for i in inputs])
        source, buffer = flat(inputs), empty_for(outputs)
        request = self._comm.Ialltoallv(raw(source, inputs), raw(buffer, outputs))
        return MPIWork([request], outputs, [source, buffer], lambda: split_back(buffer, outputs))

    @_nccl_for_cuda
    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        """Send the r-th rows to rank r, and receive likewise."""
        outputs, inputs = (
            list(tensor.split(splits) if splits else tensor.tensor_split(self.size()))
            for tensor, splits in ((output, output_splits), (source, input_splits))
        )
        return self.alltoall(outputs, inputs)

    @_nccl_for_cuda
    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> MPIWork:
        """Send tensors to one rank."""
        buffers = [tensor.contiguous() for tensor in tensors]
        requests = [self._comm.Isend(raw(buffer), destination, tag) for buffer in buffers]
        return MPIWork(requests, tensors, buffers)

    @_nccl_for_cuda
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MPIWork:
        """Receive tensors from one rank."""
        buffers = [tensor.contiguous() for tensor in tensors]
        requests = [self._comm.Irecv(raw(buffer), source, tag) for buffer in buffers]
        return MPIWork(requests, tensors, buffers, lambda: copy_all_back(buffers, tensors))

    @_nccl_for_cuda
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive tensors from whichever rank sends first."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    @_nccl_for_cuda
    def barrier(self, opts: Any = None) -> MPIWork:
        """Wait for all ranks."""
        return MPIWork([self._comm.Ibarrier()])

    def reduce_parts(
        self, outputs: Sequence[Tensor], parts: Sequence[Tensor], tensor: Tensor
    ) -> dist.Work:
        """Sum the parts of a tensor that this rank needs, with the same bits as an all-reduce.

        Args:
            outputs: 1-D tensors for the sums.
            parts: for each output, the part of ``tensor`` to sum, as a view.
            tensor: contiguous, of the same size on all ranks; it may be overwritten.
        """
        if self._node is not None and self._node.suits([tensor], AllreduceOptions().reduceOp):
            work = self._node.reduce_parts(outputs, parts, tensor)
            work.describe(f"`reduce_parts` ({self._desc}) of {self._members}")
            return self._started(work)
        reduced = self.allreduce([tensor], AllreduceOptions())
        return ChainedWork(reduced, lambda: copy_all_back(parts, outputs))

    def gather_parts(
        self, outputs: Sequence[Sequence[Tensor]], parts: Sequence[Tensor]
    ) -> dist.Work:
        """Gather several tensors, of one dtype, of which each rank has a part.

        Args:
            outputs: for each tensor, 1-D tensors for the part of each rank. This rank's may be the
                part itself.
            parts: this rank's part of each tensor, 1-D.
        """
        if self._node is not None and not parts[0].is_cuda:
            work: dist.Work = self.allgather(outputs, parts)
            return work
        by_rank = list(zip(*outputs, strict=True))
        buffers = [empty_for(each) for each in by_rank]
        gathered = self.allgather([buffers], [flat(parts)])

        def finish() -> None:
            for buffer, each in zip(buffers, by_rank, strict=True):
                split_back(buffer, each)

        return ChainedWork(gathered, finish)

    # The names of the same operations from torch 2.13 on.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _describe_members(communicator: MPI.Intracomm) -> str:
    """Return the ranks of a communicator in the job, such as "ranks 0, 1, 2, 3, ..., 14, 15"."""
    world, members = MPI.COMM_WORLD.group, communicator.group
    ranks = [str(rank) for rank in members.Translate_ranks(None, world)]
    members.Free()
    return "ranks " + ", ".join(ranks if len(ranks) <= 8 else [*ranks[:4], "...", *ranks[-2:]])


def init_process_group(device_type: str) -> None:
    """Connect all ranks of the MPI job by torch.distributed, once a process; "cuda" adds NCCL."""
    if dist.is_initialized():
        if isinstance(dist.group.WORLD, MPIProcessGroup):
            return
        raise MisconfigurationException(
            f"torch.distributed is initialised already, with the backend {dist.get_backend()!r}; "
            f"the ranks of this strategy are connected by {NAME!r}. Remove the call of "
            "torch.distributed.init_process_group, or destroy that process group before."
            + see("starting-ranks")
        )
    placed = placement()
    backend = NAME if device_type == "cpu" else f"cpu:{NAME},cuda:nccl"
    store = _store_in_memory() or (HashStore() if device_type == "cpu" else _store_over_tcp())
    dist.init_process_group(backend, store=store, rank=placed.rank, world_size=placed.world_size)


def _store_in_memory() -> Store | None:
    """Return a store of all ranks in an anonymous file of rank 0; None if a rank cannot open it.

    Ranks on other hosts cannot. Processes of other users cannot either, and no port is open.
    Collective over the job. Groups of MPI need no shared store.
    """
    world, path = MPI.COMM_WORLD, ""
    if world.rank == 0 and hasattr(os, "memfd_create"):
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('axosparse-store')}"
    path = world.bcast(path)
    opened = placement().nodes == 1 and os.access(path, os.R_OK | os.W_OK)
    return FileStore(path, world.size) if all(world.allgather(opened)) else None


def _store_over_tcp() -> Store:
    """Return a store that rank 0 serves over TCP, which NCCL needs; collective over the job."""
    world, address = MPI.COMM_WORLD, placement().main_address
    server = None
    if world.rank == 0:
        server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port = world.bcast(server and server.port)
    return server or TCPStore(address, port, is_master=False)


def _create(options: Any, _: Any) -> MPIProcessGroup:
    world = MPI.COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    members = world.group.Incl(ranks)
    with blocked("the other ranks of a process group to connect"):
        communicator = world.Create_group(members)
        members.Free()
        return MPIProcessGroup(communicator, options.store)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
