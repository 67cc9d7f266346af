"""Sends tokens to the ranks that have their experts, and back.

Every rank of a group has the same number of experts of a layer, in the order of the ranks: with 8
experts on 4 ranks, rank 1 has experts 2 and 3. A token is sent once for each of its experts, so
none is dropped. Ranks exchange the counts of tokens first, so they may have any number of tokens,
also none.

If ranks of a tensor group have the same tokens, each sends a share of them, and all get all results
(duplicate token dropping of TED, Singh et al., ICS 2023), so no expert gets a token twice.

Forward and backward passes exchange in the same order on all ranks, whichever experts their tokens
have. So both directions are in the graph of every rank, also if no expert computes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_axosparse.support.torch_internals import graph_nodes

Compute = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Computes tokens by this rank's experts. Arguments: rows, the index of each row's expert among
those of this rank, the weight of each row, and whether any rank has tokens. It returns a row for
each, multiplied by its weight.
"""

Exchange = Callable[[Tensor], Tensor]


class TokenExchange:
    """Computes tokens of all ranks of a group on the ranks that have their experts.

    Args:
        group: the ranks over which the experts are spread.
        experts: the number of experts on all ranks, which the number of ranks divides.
        same_tokens: ranks that have the same tokens and experts; None if only this rank has them.

    Attributes:
        own: the numbers of the experts of this rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        experts: int,
        same_tokens: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._experts, self._same_tokens = group, experts, same_tokens
        first, end = (experts * rank // group.size() for rank in (group.rank(), group.rank() + 1))
        self.own = range(first, end)

    def __call__(self, tokens: Tensor, chosen: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Compute tokens by their experts.

        Args:
            tokens: rows of this rank, of shape (tokens, width).
            chosen: the indices of each token's experts, of shape (tokens, experts per token).
            weights: factors of these experts' results, of the same shape.
            compute: computes rows that have one expert each.

        Returns:
            The sum over each token's experts, of the shape and dtype of ``tokens``.
        """
        if self._same_tokens is None:
            return self._computed(tokens, chosen, weights, compute)
        shares = _Shares(self._same_tokens, len(tokens))
        own, own_weights = _exchanged(shares.own, shares.joined, None, tokens, weights)
        result = self._computed(own, shares.own(chosen), own_weights, compute)
        (joined,) = _exchanged(shares.joined, shares.own, None, result)
        return joined

    def _computed(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, compute: Compute
    ) -> Tensor:
        ranks = self._group.size()
        experts, order = chosen.reshape(-1).sort(stable=True)
        sources = order.div(chosen.shape[1], rounding_mode="floor")
        counts = torch.bincount(experts, minlength=self._experts).view(ranks, len(self.own))
        # Each rank learns how many tokens there are, besides those for its own experts.
        counts = torch.nn.functional.pad(counts, (0, 1), value=len(experts))
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts, group=self._group)
        own = told[:, :-1]
        if not told[:, -1].any():  # as on one process, where a forward of no tokens has no graph
            return compute(tokens, chosen.reshape(-1), weights.reshape(-1), False)
        sent, received = counts[:, :-1].sum(1).tolist(), own.sum(1).tolist()
        there = partial(self.exchange, sent=sent, received=received)
        back = partial(self.exchange, sent=received, received=sent)
        anchor = torch.zeros((), dtype=tokens.dtype, device=tokens.device, requires_grad=True)
        leaving = tokens.index_select(0, sources), weights.reshape(-1)[order]
        rows, row_weights = _exchanged(there, back, anchor, *leaving)
        each = torch.arange(len(self.own), device=chosen.device).repeat(ranks)
        result = compute(rows, each.repeat_interleave(own.reshape(-1)), row_weights, True)
        # Where no row is computed its dtype is that of the tokens: so is that of the others.
        result = result.to(rows.dtype)
        # With the rows as anchor, the graph leads to them also if no expert has computed them.
        (returned,) = _exchanged(back, there, rows, result, by=_FromExperts)
        return returned.new_zeros(tokens.shape).index_add_(0, sources, returned)

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to each rank of the group, and receive theirs."""
        taken = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(taken, rows.contiguous(), received, sent, group=self._group)
        return taken


class _Exchanged(torch.autograd.Function):
    """Exchanges tensors in the forward pass, and gradients in the other direction in the backward.

    It is in the graph if the anchor requires a gradient, also if the tensors do not.
    """

    @staticmethod
    def forward(
        ctx: Any, there: Exchange, back: Exchange, anchor: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        exchanged = tuple(map(there, tensors))
        first = exchanged[0]
        ctx.back, ctx.shape, ctx.kind = back, first.shape, (first.dtype, first.device)
        return exchanged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *map(ctx.back, gradients)


class _FromExperts(_Exchanged):
    """The exchange that returns results of experts; :func:`exchange_nothing` looks for it."""


def _exchanged(
    there: Exchange,
    back: Exchange,
    anchor: Tensor | None,
    *tensors: Tensor,
    by: type[_Exchanged] = _Exchanged,
) -> tuple[Tensor, ...]:
    exchanged: tuple[Tensor, ...] = by.apply(  # type: ignore[no-untyped-call]
        there, back, anchor, *tensors
    )
    return exchanged


class _Shares:
    """Divides rows among ranks that have the same rows, in the order of the ranks."""

    def __init__(self, group: dist.ProcessGroup, rows: int) -> None:
        self._group, ranks = group, group.size()
        self._sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]

    def own(self, rows: Tensor) -> Tensor:
        share: Tensor = rows.split(self._sizes)[self._group.rank()]
        return share

    def joined(self, share: Tensor) -> Tensor:
        parts = [share.new_empty((size, *share.shape[1:])) for size in self._sizes]
        dist.all_gather(parts, share.contiguous(), group=self._group)
        return torch.cat(parts)


def exchange_nothing(outputs: Iterable[Tensor | None]) -> None:
    """Run the exchanges of a backward pass with gradients of zero.

    It is called on a rank without gradients, as other ranks of the group may have some.
    """
    nodes = graph_nodes(outputs, _FromExperts)
    if nodes:
        zeros = [torch.zeros(node.shape, dtype=node.kind[0], device=node.kind[1]) for node in nodes]
        torch.autograd.backward([GradientEdge(node, 0) for node in nodes], zeros)
