"""Tokens are computed by the experts of other ranks as by one's own, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.experts.traffic import Traffic
from lightning_axosparse.distributed.mpi.process_group import init_process_group
from lightning_axosparse.distributed.token_exchange import TokenExchange, exchange_nothing
from tests.ranks import run_ranks

RANKS, EXPERTS, WIDTH = 3, 6, 4
# Row: how many tokens each rank has, and the experts from which they are chosen.
ROWS: dict[str, tuple[list[int], list[int]]] = {
    "of all experts": ([5, 7, 6], list(range(EXPERTS))),
    "one rank has none": ([5, 0, 6], list(range(EXPERTS))),
    "all to one expert": ([5, 7, 6], [4, 4]),
    "none at all": ([0, 0, 0], [0, 1]),
}


def drawn(row: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = ROWS[row]
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.tensor(experts)[
        torch.rand(tokens[rank], len(experts), generator=generator).argsort(-1)[:, :2]
    ]
    rows = torch.randn(tokens[rank], WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(tokens[rank], 2, generator=generator, dtype=torch.float64)
    return rows.requires_grad_(), chosen, weights.requires_grad_()


def parameters() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def computed(rows: Tensor, numbers: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    results = rows.unsqueeze(1).bmm(experts[numbers]).squeeze(1).tanh()
    return results * weights[:, None]


def on_one(row: str, rank: int, experts: Tensor) -> tuple[Tensor, list[Tensor]]:
    tokens, chosen, weights = drawn(row, rank)
    each = computed(
        tokens.repeat_interleave(2, 0), chosen.reshape(-1), weights.reshape(-1), experts
    )
    result = each.view(-1, 2, WIDTH).sum(1)
    result.square().sum().backward()
    return result.detach(), [tokens.grad, weights.grad]


def on_rank() -> dict[str, Any]:
    init_process_group("cpu")
    group = dist.group.WORLD
    rank = group.rank()
    found = {}
    for row in ROWS:
        own = parameters().view(RANKS, -1, WIDTH, WIDTH)[rank].clone().requires_grad_()
        exchange = TokenExchange(group, EXPERTS)
        any_tokens = []

        def compute(rows: Tensor, numbers: Tensor, weights: Tensor, some: bool, own=own) -> Tensor:
            any_tokens.append(some)  # noqa: B023
            return computed(rows, numbers, weights, own) if len(rows) or not some else rows

        tokens, chosen, weights = drawn(row, rank)
        with Traffic.counted() as traffic:
            result = exchange(tokens, chosen, weights, compute)
            result.square().sum().backward()
        gradients = [tokens.grad, weights.grad, own.grad]
        # Then without a gradient on one rank, and by tokens that need none.
        own.grad = None
        result = exchange(tokens.detach(), chosen, weights.detach(), compute)
        if rank == 0:
            exchange_nothing([None, result])
        elif result.requires_grad:
            result.square().sum().backward()
        found[row] = result.detach(), gradients, any_tokens, traffic.tokens, own.grad
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, on_rank)


@pytest.mark.parametrize("row", ROWS)
def test_results_and_gradients_are_those_of_one_process(
    row: str, ranks: list[dict[str, Any]]
) -> None:
    experts = parameters().requires_grad_()
    for rank, found in enumerate(ranks):
        result, gradients, any_tokens, *_ = found[row]
        expected, of_tokens = on_one(row, rank, experts)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(gradients[:2], of_tokens)
        assert any_tokens == [row != "none at all"] * 2
    own = [found[row][1][2] for found in ranks]
    zeros = torch.zeros(EXPERTS // RANKS, WIDTH, WIDTH, dtype=torch.float64)
    own = [zeros if gradient is None else gradient for gradient in own]
    torch.testing.assert_close(torch.cat(own), experts.grad)


def test_a_rank_whose_results_have_no_gradient_takes_part(ranks: list[dict[str, Any]]) -> None:
    row = "of all experts"
    experts = parameters().requires_grad_()
    for rank in (1, 2):
        on_one(row, rank, experts)
    assert experts.grad is not None
    torch.testing.assert_close(torch.cat([found[row][4] for found in ranks]), experts.grad)


def test_bytes_are_those_of_tokens_of_other_ranks(ranks: list[dict[str, Any]]) -> None:
    row = "of all experts"
    to_others = [
        sum(int(expert) // 2 != rank for expert in drawn(row, rank)[1].reshape(-1))
        for rank in range(RANKS)
    ]
    of_others = [
        sum(
            int(expert) // 2 == rank
            for other in {*range(RANKS)} - {rank}
            for expert in drawn(row, other)[1].reshape(-1)
        )
        for rank in range(RANKS)
    ]
    for found, mine, theirs in zip(ranks, to_others, of_others, strict=True):
        # Tokens, weights, and the gradients of results; results, and the gradients of the others.
        assert found[row][3] == 8 * ((2 * WIDTH + 1) * mine + (2 * WIDTH + 1) * theirs)


def with_shares() -> dict[str, Any]:
    """Two tensor ranks of each of two replicas: with shares of the tokens, and each with all."""
    init_process_group("cpu")
    tensor, replica = dist.get_rank() % 2, dist.get_rank() // 2
    same = [dist.new_group([0, 1]), dist.new_group([2, 3])][replica]
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][tensor]
    found = {}
    for way, same_tokens in (("all", None), ("shares", same)):
        own = parameters().view(2, -1, WIDTH, WIDTH)[replica].clone().requires_grad_()
        exchange = TokenExchange(group, EXPERTS, same_tokens)

        def compute(rows: Tensor, numbers: Tensor, weights: Tensor, _: bool, own=own) -> Tensor:
            return computed(rows, numbers, weights, own) if len(rows) else rows

        tokens, chosen, weights = drawn("of all experts", replica)
        with Traffic.counted() as traffic:
            result = exchange(tokens, chosen, weights, compute)
            result.square().sum().backward()
        assert own.grad is not None
        found[way] = result.detach(), tokens.grad, weights.grad, own.grad, traffic.tokens
    return found


def test_ranks_with_the_same_tokens_share_the_work_and_the_bytes() -> None:
    ranks = run_ranks(4, with_shares)
    for found in ranks:
        for whole, shared in list(zip(found["all"], found["shares"], strict=True))[:3]:
            torch.testing.assert_close(shared, whole)
    for replica in (ranks[:2], ranks[2:]):
        gradients = [found["shares"][3] for found in replica]
        torch.testing.assert_close(sum(gradients), replica[0]["all"][3])
    sent = {way: sum(found[way][4] for found in ranks) for way in ("all", "shares")}
    assert sent["shares"] == sent["all"] / 2
