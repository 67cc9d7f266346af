"""Sends tokens to the ranks that have their experts, and back.

Every rank of a group has as many experts of a layer, in the order of the ranks. A token is sent
once for each of its experts, so none is dropped. What ranks exchange is told first, in a row of
counts, so that they may have any number of tokens, also none.

Where ranks of a tensor group have the same tokens, each sends a share of them, and all get all
results (duplicate token dropping of TED, Singh et al., ICS 2023): no expert gets a token twice.

Forward and backward passes exchange in the same order on all ranks, whatever experts their tokens
have. So both directions are in every rank's graph, also where no expert computes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_axosparse.distributed.kept_results import collectives_send
from lightning_axosparse.support.torch_internals import graph_nodes

Compute = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Computes tokens by this rank's experts: rows, the numbers of their experts among those of this
rank, their weights, and whether any rank has tokens; it returns a row for each, times its weight.
"""


class TokenExchange:
    """Lets tokens of all ranks of a group be computed by the ranks that have their experts.

    Args:
        group: the ranks over which the experts are spread.
        experts: the number of experts on all ranks, which the number of ranks divides.
        same_tokens: ranks that have the same tokens, and the same experts; None for this one alone.

    Attributes:
        sent_bytes: bytes of tokens that this rank has sent to others, in all passes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        experts: int,
        same_tokens: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._own, self._same_tokens = group, experts // group.size(), same_tokens
        self._experts = experts
        self.sent_bytes = 0

    def __call__(self, tokens: Tensor, chosen: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Compute tokens by their experts.

        Args:
            tokens: rows of this rank, of shape (tokens, width).
            chosen: the numbers of each token's experts, of shape (tokens, experts a token).
            weights: by which what they return is multiplied, of the same shape.
            compute: computes rows that have one expert each.

        Returns:
            The sum over each token's experts, of the shape and dtype of ``tokens``.
        """
        if self._same_tokens is None:
            return self._computed(tokens, chosen, weights, compute)
        shares = _Shares(self._same_tokens, len(tokens))
        own, own_weights = _OwnShare.apply(  # type: ignore[no-untyped-call]
            tokens, weights, shares
        )
        result = self._computed(own, shares.own(chosen), own_weights, compute)
        joined: Tensor = _AllShares.apply(result, shares)  # type: ignore[no-untyped-call]
        return joined

    def _computed(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, compute: Compute
    ) -> Tensor:
        ranks = self._group.size()
        numbers, order = chosen.reshape(-1).sort(stable=True)
        sources = order.div(chosen.shape[1], rounding_mode="floor")
        counts = torch.bincount(numbers, minlength=self._experts).view(ranks, self._own)
        # Each rank learns how many tokens there are, besides those for its own experts.
        counts = torch.nn.functional.pad(counts, (0, 1), value=len(numbers))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        own, total = received[:, :-1], received[:, -1].sum()
        route = _Route(self, counts[:, :-1].sum(1).tolist(), own.sum(1).tolist())
        anchor = torch.zeros((), dtype=tokens.dtype, device=tokens.device, requires_grad=True)
        rows, row_weights = _ToExperts.apply(  # type: ignore[no-untyped-call]
            tokens.index_select(0, sources), weights.reshape(-1)[order], anchor, route
        )
        each = torch.arange(self._own, device=chosen.device).repeat(ranks)
        result = compute(rows, each.repeat_interleave(own.reshape(-1)), row_weights, bool(total))
        # Where no row is computed its dtype is that of the tokens: so is that of the others.
        returned: Tensor = _FromExperts.apply(  # type: ignore[no-untyped-call]
            result.to(rows.dtype), rows, sources, tokens.shape, route
        )
        return returned

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to each rank of the group, and receive theirs."""
        taken = rows.new_empty((sum(received), *rows.shape[1:]))
        rows = rows.contiguous()
        dist.all_to_all_single(taken, rows, received, sent, group=self._group)
        if collectives_send() and len(rows):
            of_others = sum(sent) - sent[self._group.rank()]
            self.sent_bytes += of_others * rows[0].nbytes
        return taken


class _Route:
    """How many rows go to each rank, and come from it."""

    def __init__(self, exchange: TokenExchange, sent: list[int], received: list[int]) -> None:
        self._exchange, self._sent, self._received = exchange, sent, received

    def there(self, rows: Tensor) -> Tensor:
        return self._exchange.exchange(rows, self._sent, self._received)

    def back(self, rows: Tensor) -> Tensor:
        return self._exchange.exchange(rows, self._received, self._sent)


class _ToExperts(torch.autograd.Function):
    """Is in the graph by its anchor also where tokens have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, anchor: Tensor, route: _Route
    ) -> tuple[Tensor, Tensor]:
        ctx.route = route
        return route.there(tokens), route.there(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, weights = map(ctx.route.back, gradients)
        return tokens, weights, None, None


class _FromExperts(torch.autograd.Function):
    """Depends on the rows that were received, whether or not an expert has computed them."""

    @staticmethod
    def forward(
        ctx: Any, result: Tensor, rows: Tensor, sources: Tensor, shape: torch.Size, route: _Route
    ) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.route, ctx.shape, ctx.kind = route, shape, (result.dtype, result.device)
        return result.new_zeros(shape).index_add_(0, sources, route.back(result))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (sources,) = ctx.saved_tensors
        return ctx.route.there(gradient.index_select(0, sources)), None, None, None, None


class _Shares:
    """The shares of rows that ranks with the same rows have, in the order of the ranks."""

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


class _OwnShare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, shares: _Shares
    ) -> tuple[Tensor, Tensor]:
        ctx.shares = shares
        return shares.own(tokens), shares.own(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, weights = map(ctx.shares.joined, gradients)
        return tokens, weights, None


class _AllShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, shares: _Shares) -> Tensor:
        ctx.shares = shares
        return shares.joined(share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.shares.own(gradient), None


def exchange_nothing(outputs: Iterable[Tensor | None]) -> None:
    """Run the exchanges of a backward pass with gradients of zero, as no output has one.

    Other ranks of the group may have gradients.
    """
    found = graph_nodes(outputs, _FromExperts)
    if found:
        zeros = [torch.zeros(node.shape, dtype=node.kind[0], device=node.kind[1]) for node in found]
        torch.autograd.backward([GradientEdge(node, 0) for node in found], zeros)
