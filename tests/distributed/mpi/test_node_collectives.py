"""Collectives through shared memory, with all ranks in one process and on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.distributed.mpi import node_collectives
from lightning_axosparse.distributed.mpi.node_collectives import Member, NodeCollectives
from lightning_axosparse.distributed.mpi.shared_memory import arena
from tests.ranks import run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def group(ranks: int) -> list[NodeCollectives]:
    """The ranks of a group, all of them in this process."""
    own = arena()
    assert own is not None
    counters = [own.block(4096).zero_() for _ in range(ranks)]
    members = [Member(own.memory, block.view(torch.int64).numpy()) for block in counters]
    return [NodeCollectives(rank, members, own, block) for rank, block in enumerate(counters)]


def drawn(rank: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(size, generator=generator).to(dtype)


def parts_of(rank: int, ranks: int, tensor: Tensor) -> list[Tensor]:
    """Some parts of a tensor that a rank wants: one of its own, and one that all want."""
    return [tensor.tensor_split(ranks)[rank], tensor[: len(tensor) // 2]]


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(
            st.integers(1, 300),
            st.sampled_from(DTYPES),
            st.sampled_from(["reduce", "parts", "gather", "exchange"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 4), max_size=40),
    st.integers(1, 4),
)
def test_the_order_in_which_ranks_advance_does_not_matter(
    ranks: int, wanted: list[tuple[int, torch.dtype, str]], turns: list[int], ahead: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_collectives, "MAX_PENDING", ahead)
        patch.setattr(node_collectives, "CHUNK", 16)
        nodes = group(ranks)
        tensors: list[list[Any]] = [[] for _ in nodes]
        works: list[list[Any]] = [[] for _ in nodes]
        every_rank_often = [r for r in range(ranks) for _ in wanted]
        for rank in [t for t in turns if t < ranks] + every_rank_often:
            if len(works[rank]) < len(wanted):
                size, dtype, what = wanted[len(works[rank])]
                tensor = drawn(rank, len(works[rank]), size, dtype)
                if what == "exchange":  # Each rank sends its r-th piece to rank r.
                    pieces = tensor.tensor_split(ranks)
                    tensor = tensor.new_empty(ranks, len(pieces[rank]))
                    given = [[piece] for piece in pieces]
                    works[rank].append(nodes[rank].exchange([[row] for row in tensor], given))
                elif what == "gather":  # Each rank has two tensors for all.
                    output = tensor.new_empty(ranks * size)
                    outputs = [piece.split(-(-size // 2)) for piece in output.split(size)]
                    given = tensor.split(-(-size // 2))
                    works[rank].append(nodes[rank].exchange(outputs, [given]))
                    tensor = output
                elif what == "parts":
                    parts = parts_of(rank, ranks, tensor)
                    sums = [torch.empty_like(part) for part in parts]
                    works[rank].append(nodes[rank].reduce_parts(sums, parts, tensor))
                    tensor = sums
                else:
                    works[rank].append(nodes[rank].all_reduce([tensor]))
                tensors[rank].append(tensor)
            nodes[rank].advance()
        for rank in reversed(range(ranks)):
            for work in reversed(works[rank]):
                assert work.wait()
    for number, (size, dtype, what) in enumerate(wanted):
        found = [of_rank[number] for of_rank in tensors]
        every = [drawn(rank, number, size, dtype) for rank in range(ranks)]
        if what == "exchange":
            sent = [tensor.tensor_split(ranks) for tensor in every]
            for rank, tensor in enumerate(found):
                assert torch.equal(tensor, torch.stack([pieces[rank] for pieces in sent]))
            continue
        if what == "gather":
            assert all(torch.equal(tensor, torch.cat(every)) for tensor in found)
            continue
        # Ranks are added in their order; 16-bit sums are rounded once.
        total = sum(each.to(torch.promote_types(dtype, torch.float32)) for each in every)
        assert isinstance(total, Tensor)
        for rank, sums in enumerate(found):
            expected = parts_of(rank, ranks, total) if what == "parts" else [total]
            for one, other in zip(sums if what == "parts" else [sums], expected, strict=True):
                assert torch.equal(one, other.to(dtype))


def test_a_sum_waits_for_all_ranks_at_both_ends() -> None:
    first, second = group(2)
    mine, theirs = torch.full((10,), 1.0), torch.full((10,), 2.0)
    work = first.all_reduce([mine])
    assert not first.advance()
    other = second.all_reduce([theirs])  # sums its half
    assert not second.advance()
    assert first.advance()
    assert not first.is_done(1)  # the second may still read
    assert second.advance()
    assert work.is_completed()
    assert other.is_completed()
    assert mine.tolist() == theirs.tolist() == [3.0] * 10


def lists(outputs: Tensor, value: float) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The rows of a tensor, and as many of a value to exchange for them."""
    return [[row] for row in outputs], [[row] for row in torch.full_like(outputs, value)]


def test_what_a_rank_has_taken_is_its_own_and_what_it_has_published_stays() -> None:
    first, second = group(2)
    mine, theirs = torch.empty(2, 3), torch.empty(2, 3)
    work = first.exchange(*lists(mine, 1.0))
    assert not work.is_completed()
    other = second.exchange(*lists(theirs, 2.0))
    assert work.is_completed()
    assert mine.tolist() == [[1.0] * 3, [2.0] * 3]
    again = first.exchange(*lists(mine, 3.0))  # The second still reads.
    assert other.is_completed()
    assert theirs.tolist() == [[1.0] * 3, [2.0] * 3]
    assert not again.is_completed()


def test_tensors_in_shared_memory_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(nbytes: int) -> Tensor:
        raise AssertionError(f"{nbytes} bytes were allocated")

    nodes, own = group(2), arena()
    assert own is not None
    inside = [own.block(4000).view(torch.float32).fill_(rank + 1) for rank in range(2)]
    monkeypatch.setattr(own, "block", allocate)
    works = [node.all_reduce([tensor]) for node, tensor in zip(nodes, inside, strict=True)]
    assert all(work.wait() for work in works)
    assert all((tensor == 3).all() for tensor in inside)


def test_mpi_reduces_small_tensors_other_types_and_operations() -> None:
    from torch.distributed import AllreduceOptions, ReduceOp

    node, options = group(1)[0], AllreduceOptions()
    large = torch.zeros(2**17)
    assert node.suits([large, large.half()], options.reduceOp)
    assert not node.suits([large, torch.zeros(10)], options.reduceOp)
    assert not node.suits([large.long()], options.reduceOp)
    options.reduceOp = ReduceOp.MAX
    assert not node.suits([large], options.reduceOp)


def on_ranks() -> dict[str, Any]:
    import torch.distributed as dist
    from mpi4py import MPI

    from lightning_axosparse.distributed.mpi.process_group import init_process_group
    from lightning_axosparse.distributed.mpi.shared_memory import BlockPool

    torch.set_num_threads(1)
    init_process_group("cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    again = dist.new_group(list(range(ranks)))
    pool, found = BlockPool(), {}

    def of(rank: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return drawn(rank, number, size, dtype)
        return torch.arange(size).add(rank).to(dtype)

    wanted = [
        (size, dtype)
        for size in (100, 2**17 + 1, 300_001)
        for dtype in (*DTYPES, torch.int32, torch.int64)
    ]
    through_memory: list[tuple[int, torch.dtype]] = []
    reduce = NodeCollectives.all_reduce

    def counted(node: NodeCollectives, given: Sequence[Tensor]) -> Any:
        through_memory.extend((tensor.numel(), tensor.dtype) for tensor in given)
        return reduce(node, given)

    NodeCollectives.all_reduce = counted  # type: ignore[method-assign]
    tensors, works = [], []
    for number, (size, dtype) in enumerate(wanted):
        tensor = of(rank, number, size, dtype)
        if number % 2:
            tensor = pool.empty((size,), dtype, tensor.device).copy_(tensor)
        tensors.append(tensor)
        works.append(dist.all_reduce(tensor, group=(None, again)[number % 3 % 2], async_op=True))
    # Each rank waits in an order of its own, and one of them for something else at first.
    if rank == 0:
        dist.barrier()
    for number in np.random.default_rng(rank).permutation(len(works)):
        works[number].wait()
    if rank != 0:
        dist.barrier()
    for number, (size, dtype) in enumerate(wanted):
        every = [of(r, number, size, dtype) for r in range(ranks)]
        exact = torch.stack([each.double() for each in every]).sum(0)
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0
        near = torch.allclose(tensors[number].double(), exact, rtol=eps, atol=1e-6)
        assert near, (size, dtype)
    large = [each for each in wanted if each[0] > 100 and each[1].is_floating_point]
    assert through_memory == large
    found["bits"] = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]

    for number, (size, dtype) in enumerate(wanted):
        pieces = [of(r, number, size, dtype) for r in range(ranks)]
        output = pool.empty((ranks, size), dtype, torch.device("cpu"))
        source = output[rank].copy_(pieces[rank]) if number % 2 else pieces[rank]
        again.allgather_into_tensor_coalesced([output.view(-1)], [source]).wait()
        assert torch.equal(output, torch.stack(pieces)), (size, dtype)

    for node in (again._node, None):  # By messages, as between nodes.
        again._node = node
        for number, (size, dtype) in enumerate(wanted):
            tensor = of(rank, number, size, dtype)
            pieces = [list(tensor.new_empty(size).tensor_split(ranks)) for _ in range(2)]
            given = [tensor.tensor_split(ranks)[rank], tensor.tensor_split(ranks)[rank] + 1]
            again.gather_parts(pieces, given).wait()
            every = [of(r, number, size, dtype).tensor_split(ranks)[r] for r in range(ranks)]
            for more, whole in enumerate(pieces):
                assert torch.equal(torch.cat(whole), torch.cat(every) + more), (size, dtype)
            summed = tensor.clone()
            dist.all_reduce(summed, group=again)
            sums = [torch.empty_like(part) for part in parts_of(rank, ranks, tensor)]
            again.reduce_parts(sums, parts_of(rank, ranks, tensor), tensor).wait()
            for one, other in zip(sums, parts_of(rank, ranks, summed), strict=True):
                assert torch.equal(one, other), (size, dtype)

    rows = torch.full((300, 600), float(rank)).t()
    dist.all_reduce(rows)
    assert rows.stride() == (1, 600)
    assert rows.unique().tolist() == [sum(range(ranks))]
    dist.destroy_process_group()
    if rank == 1:
        node_collectives.arena = lambda: None
    found["one has no memory to share"] = (
        node_collectives.node_collectives(MPI.COMM_WORLD) is not None
    )
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_real_ranks_end_with_the_same_bits(ranks: int) -> None:
    first, *others = run_ranks(ranks, on_ranks)
    assert not first["one has no memory to share"]
    assert all(other == first for other in others)
