"""torch.distributed over MPI: the same results as gloo's, on real ranks."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics import CatMetric, MeanMetric

from lightning_axosparse.distributed.mpi import process_group as module
from lightning_axosparse.distributed.mpi.process_group import MPIProcessGroup, init_process_group
from tests.ranks import run_ranks

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn]

same_on_all_ranks = settings(derandomize=True, database=None, deadline=None, max_examples=60)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
layouts = st.sampled_from(["contiguous", "transposed", "strided"])


def drawn(dtype: torch.dtype, shape: tuple[int, ...], layout: str, seed: int) -> Tensor:
    """The same tensor on every rank that names the same seed; small values, exact in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=generator)
    tensor = values.to(dtype)
    if layout == "transposed" and len(shape) > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


def assert_same(actual: Any, expected: Any) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist()


def bits(tensor: Tensor) -> Tensor:
    """Gloo moves neither every dtype nor, rightly, every layout; it moves contiguous bytes."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def connect() -> tuple[int, int, dist.ProcessGroup]:
    torch.set_num_threads(1)
    init_process_group("cpu")
    return dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")


def collectives_like_gloo() -> int:
    rank, ranks, gloo = connect()
    world, examples = dist.group.WORLD, 0

    @same_on_all_ranks
    @given(st.sampled_from(INTEGERS + FLOATS + OTHERS), shapes.filter(len), layouts, st.data())
    def moves(dtype: torch.dtype, shape: tuple[int, ...], layout: str, data: st.DataObject) -> None:
        nonlocal examples
        examples += 1
        root = data.draw(st.integers(0, ranks - 1))
        every = [drawn(dtype, shape, layout, seed=r) for r in range(ranks)]

        def run(group: dist.ProcessGroup, tensors: list[Tensor]) -> list[Tensor]:
            copied = torch.empty_like(tensors[rank])
            copied.copy_(tensors[rank])
            dist.broadcast(copied, root, group=group)
            gathered = [torch.empty_like(copied) for _ in range(ranks)]
            dist.all_gather(gathered, tensors[rank], group=group)
            on_root = [torch.empty_like(copied) for _ in range(ranks)] if rank == root else None
            dist.gather(tensors[rank], on_root, root, group=group)
            dealt = torch.empty_like(copied)
            dist.scatter(dealt, tensors if rank == root else None, root, group=group)
            stacked = torch.cat([torch.zeros_like(copied)] * ranks)
            group._allgather_base(stacked, tensors[rank].contiguous()).wait()
            return [copied, *gathered, *(on_root or []), dealt, stacked]

        mpi = run(world, every)
        assert_same(map(bits, mpi), run(gloo, [bits(tensor) for tensor in every]))
        assert_same(mpi[1 : ranks + 1], every)

    @same_on_all_ranks
    @given(
        st.sampled_from([dtype for dtype in INTEGERS + FLOATS if dtype != torch.int16]),
        shapes,
        layouts,
        st.sampled_from([ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]),
        st.integers(0, ranks - 1),
    )
    def reductions(
        dtype: torch.dtype, shape: tuple[int, ...], layout: str, op: Any, root: int
    ) -> None:
        nonlocal examples
        examples += 1
        mine = drawn(dtype, shape, layout, seed=rank)

        def run(group: dist.ProcessGroup, reduced: Tensor, rooted: Tensor) -> list[Tensor]:
            dist.all_reduce(reduced, op, group=group)
            dist.reduce(rooted, root, op, group=group)
            return [reduced, *([rooted] if rank == root else [])]

        plain = mine.clone(memory_format=torch.contiguous_format)
        same_layout = drawn(dtype, shape, layout, seed=rank)
        mpi = run(world, mine, same_layout)
        assert_same(mpi, run(gloo, plain.clone(), plain.clone()))

    moves()
    reductions()
    return examples


def reductions_that_gloo_lacks() -> None:
    rank, ranks, _ = connect()
    every = [torch.arange(6).add(r) for r in range(ranks)]

    def reduced(dtype: torch.dtype, op: Any) -> list[Any]:
        tensor = every[rank].clone().to(dtype)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    for op, function in [
        (ReduceOp.BAND, operator.and_),
        (ReduceOp.BOR, operator.or_),
        (ReduceOp.BXOR, operator.xor),
    ]:
        for dtype in [*INTEGERS, torch.uint16, torch.uint32, torch.uint64, torch.bool]:
            expected = reduce(function, [each.to(dtype) for each in every])
            assert reduced(dtype, op) == expected.tolist(), (op, dtype)

    total = sum(every)
    for dtype in [*FLOATS, torch.complex64, torch.complex128]:
        assert reduced(dtype, ReduceOp.AVG) == (total / ranks).to(dtype).tolist(), dtype
    assert reduced(torch.int64, ReduceOp.AVG) == (total // ranks).tolist()
    assert reduced(torch.complex64, ReduceOp.SUM) == total.to(torch.complex64).tolist()

    truth = torch.tensor([rank == 0, True, False])
    for op, expected in [
        (ReduceOp.SUM, [True, True, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.PRODUCT, [False, True, False]),
        (ReduceOp.MIN, [False, True, False]),
    ]:
        tensor = truth.clone()
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == expected, op
    with pytest.raises(ValueError, match="convert it first"):
        dist.all_reduce(truth, ReduceOp.AVG)

    # Halves are added as floats and rounded once: 2048 + 1 is not a half, 2048 + 1 + 1 is.
    ones = torch.tensor([2048.0 if rank == 0 else 1.0], dtype=torch.float16)
    dist.all_reduce(ones)
    assert ones.item() == 2048 + ranks - 1

    # uneven pieces
    pieces = [torch.full((r,), float(rank)) for r in range(ranks)]
    mine = torch.empty(rank)
    dist.reduce_scatter(mine, pieces)
    assert mine.tolist() == [sum(range(ranks))] * rank
    slices = torch.arange(2.0 * ranks, dtype=torch.bfloat16).add(rank)
    mine = torch.empty(2, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(mine, slices, ReduceOp.AVG)
    middle = sum(range(ranks)) / ranks
    assert mine.tolist() == [2 * rank + middle, 2 * rank + 1 + middle]


def exchanges() -> None:
    """By memory that ranks share, and by MPI."""
    rank, ranks, _ = connect()
    world: Any = dist.group.WORLD
    node = world._node
    for way in (node, None):
        world._node = way
        for dtype in (torch.float32, torch.complex128, torch.bool, torch.bfloat16):
            received = [torch.empty(r + 1, rank + 1, dtype=dtype) for r in range(ranks)]
            sent = [torch.full((rank + 1, r + 1), rank).to(dtype) for r in range(ranks)]
            dist.all_to_all(received, sent)
            expected = [torch.full((r + 1, rank + 1), r).to(dtype) for r in range(ranks)]
            assert_same(received, expected)
            # Into and from tensors that are not contiguous.
            columns = [torch.empty(3, 2, dtype=dtype).t() for _ in range(ranks)]
            dist.all_gather(columns, torch.arange(6).view(3, 2).add(rank).to(dtype).t())
            every = [torch.arange(6).view(3, 2).add(r).to(dtype).t() for r in range(ranks)]
            assert_same(columns, every)
        rows = torch.empty(ranks, 2)
        dist.all_to_all_single(rows, torch.full((ranks, 2), float(rank)))
        assert rows[:, 1].tolist() == list(range(ranks))
        rows = torch.empty(sum(range(ranks)), 2)
        dist.all_to_all_single(
            rows, torch.full((rank * ranks, 2), float(rank)), list(range(ranks)), [rank] * ranks
        )
        assert rows[:, 0].tolist() == [r for r in range(ranks) for _ in range(r)]
        # One after another, of which each may be waited for last.
        works, results = [], []
        for number in range(9):
            results.append(torch.empty(ranks, 1000))
            mine = torch.full((ranks, 1000), float(rank + 10 * number))
            works.append(dist.all_to_all_single(results[-1], mine, async_op=True))
        for number in reversed(range(9)) if rank else range(9):
            works[number].wait()
        for number, result in enumerate(results):
            assert result.unique().tolist() == [r + 10.0 * number for r in range(ranks)]
        assert not world._pending
    world._node = node


def asynchronous_work() -> int:
    rank, ranks, _ = connect()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks

    tensor = torch.full((1000,), float(rank))
    address = tensor.data_ptr()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    assert tensor.data_ptr() == address
    assert tensor.unique().tolist() == [sum(range(ranks))]
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [2.0 * ranks] * 2

    # A work that nobody keeps still sends what it was given.
    dist.isend(torch.full((1 << 16,), rank), following)
    torch.empty(1 << 16).fill_(-1)
    received = torch.zeros(1 << 16, dtype=torch.long)
    assert dist.recv(received) == previous
    assert received.unique().tolist() == [previous]

    by_tag = [torch.zeros(2), torch.zeros(2)]
    sends = [dist.isend(torch.full((2,), float(tag)), following, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        dist.recv(by_tag[tag - 1], previous, tag=tag)
    assert [tensor[0].item() for tensor in by_tag] == [1.0, 2.0]
    for send in sends:
        send.wait()
    batch = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.tensor([rank]), following),
            dist.P2POp(dist.irecv, source := torch.tensor([-1]), previous),
        ]
    )
    for work in batch:
        work.wait()
    assert source.item() == previous

    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(weight, src=1)
    assert weight.tolist() == [1.0] * 3
    dist.barrier()

    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, {"rank": rank, "padding": "x" * 100 * rank})
    assert [each["rank"] for each in gathered] == list(range(ranks))
    objects = [{"from": rank}]
    dist.broadcast_object_list(objects, src=ranks - 1)
    assert objects == [{"from": ranks - 1}]
    on_root = [None] * ranks if rank == 1 else None
    dist.gather_object(rank, on_root, dst=1)
    assert on_root == (list(range(ranks)) if rank == 1 else None)

    with dist._coalescing_manager() as manager:
        together = [torch.full((2,), float(rank)), torch.full((3,), 1.0)]
        for tensor in together:
            dist.all_reduce(tensor)
    assert manager is not None
    assert [tensor[0].item() for tensor in together] == [sum(range(ranks)), ranks]

    # A rank that no longer wants its group's world starts anew.
    dist.destroy_process_group()
    assert not dist.is_initialized()
    init_process_group("cpu")
    init_process_group("cpu")
    again = torch.ones(1)
    dist.all_reduce(again)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(MisconfigurationException, match="'gloo'"):
        init_process_group("cpu")
    return int(again.item())


def on_three_ranks() -> tuple[int, int]:
    examples = collectives_like_gloo()
    reductions_that_gloo_lacks()
    exchanges()
    return examples, asynchronous_work()


def test_on_three_ranks():
    """One job for all that takes three ranks: to start it takes longer than to run it."""
    for examples, ranks_after_all in run_ranks(3, on_three_ranks):
        assert examples > 100
        assert ranks_after_all == 3


def groups_and_metrics() -> dict[str, Any]:
    rank, _, _ = connect()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "inter"))
    found = {}
    for name in ("data", "inter"):
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        found[name] = tensor.item()
    # Ranks meet in the order that the group lists them, each in its own place.
    some = dist.new_group([1, 3])
    alone = dist.new_group([2])
    if rank in (1, 3):
        both = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(both, torch.tensor([float(rank)]), group=some)
        found["some"] = [tensor.item() for tensor in both]
        copy = torch.tensor([rank])
        dist.broadcast(copy, src=3, group=some)
        found["copy"] = copy.item()
    if rank == 2:
        single = torch.tensor([7.0])
        dist.all_reduce(single, group=alone)
        found["alone"] = single.item()
    mean, every = MeanMetric(), CatMetric()
    mean.update(float(rank))
    every.update(torch.full((rank + 1,), float(rank)))
    found["mean"] = mean.compute().item()
    found["every"] = every.compute().tolist()
    pair = MeanMetric(process_group=mesh.get_group("data"))
    pair.update(float(rank))
    found["pair"] = pair.compute().item()
    dist.destroy_process_group()
    return found


def test_groups_and_metrics():
    ranks = run_ranks(4, groups_and_metrics)
    assert [found["data"] for found in ranks] == [2, 4, 2, 4]
    assert [found["inter"] for found in ranks] == [1, 1, 5, 5]
    assert [found.get("some") for found in ranks] == [None, [1, 3], None, [1, 3]]
    assert [found.get("copy") for found in ranks] == [None, 3, None, 3]
    assert ranks[2]["alone"] == 7
    assert {found["mean"] for found in ranks} == {1.5}
    assert {tuple(found["every"]) for found in ranks} == {(0, 1, 1, 2, 2, 2, 3, 3, 3, 3)}
    assert [found["pair"] for found in ranks] == [1, 2, 1, 2]


def test_cuda_tensors_go_to_nccl():
    from mpi4py import MPI

    calls = []

    class NCCL:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: calls.append((name, args))

    group = MPIProcessGroup(MPI.COMM_SELF.Dup(), dist.HashStore())
    vars(group)["nccl"] = NCCL()
    with FakeTensorMode():
        there, here = torch.empty(2, device="cuda"), torch.empty(2)
    options = dist.AllreduceOptions()
    group.allreduce([there], options)
    group.allgather([[there]], [there])
    assert [name for name, _ in calls] == ["allreduce", "allgather"]
    assert calls[0][1] == ([there], options)
    assert here.device.type == "cpu"
    group.barrier().wait()
    assert len(calls) == 2


def stores() -> list[Any]:
    """What the other rank finds in each kind of store, and where the first rank listens for it."""
    from mpi4py import MPI

    world, found = MPI.COMM_WORLD, []
    for make in (module._store_in_memory, module._store_over_tcp):
        before, store = listening(), make()
        assert store is not None
        store.set(f"from {world.rank}", "written")
        value = store.get(f"from {1 - world.rank}")
        found.append((value, world.bcast({address.ip for address in listening() - before})))
        world.Barrier()
    return found


def listening() -> set[Any]:
    """Where this process listens: MPI does, too."""
    connections = psutil.Process().net_connections("inet")
    return {connection.laddr for connection in connections if connection.status == "LISTEN"}


def test_ranks_share_a_store_for_which_nobody_listens_on_one_host():
    for in_memory, (value, _) in run_ranks(2, stores):
        assert in_memory == (b"written", set())
        assert value == b"written"
