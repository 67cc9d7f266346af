"""Weighs the losses of micro-batches, so that their gradients add up to that of the batch's loss.

A mean is weighted by its denominator, a function of means by its derivative. These are known once
the last stage has computed the losses, but the first micro-batches are differentiated before all
are computed. Their weights are provisional, by comparison with one micro-batch: correct up to
one factor, which is the same for the whole batch. The factor is known before the last backward pass
of the last stage, and is sent to the other stages with the gradients of the last micro-batch.

There is no such weight for a function of several means, such as the loss that balances experts, a
product of the shares of tokens and the mean probabilities of experts, or a mean over tokens plus
one over samples. Its gradient by each of these numbers depends on those of the whole batch. There
backward passes begin when all forward passes have run, and each begins at these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.loss.combination import Rule, own_rule, shares, slopes
from lightning_axosparse.pipeline.loss.terms import Leaf, Term


class LossWeights:
    """The weights of one batch's micro-batches, on the last stage of a pipeline.

    Args:
        sizes: samples of the micro-batches that this pipeline computes, in order; or what the user
            weights them by.
        total: the same of the whole batch.
        replicas: the last stages of the replicas that share the batch; None for one replica.
        rule: how losses combine, as the first batch has shown, or "samples" where the user has
            given their weights; None if it is to follow from how they are computed.
        needs_batch: whether gradients depend on numbers of the whole batch, so that all losses have
            to be added before the first is differentiated; the first batch shows this, too.
        adds_all_first: whether all losses are added before the first is differentiated in any case.
            Weights are final then, and have to be where ranks compute gradients of one another's
            losses: their factors would differ.
    """

    def __init__(
        self,
        sizes: Sequence[float],
        total: float,
        replicas: dist.ProcessGroup | None = None,
        rule: Rule | None = None,
        needs_batch: bool = False,
        adds_all_first: bool = False,
    ) -> None:
        self._sizes, self._size_of_batch = sizes, total
        self._replicas, self._rule = replicas, rule
        self.needs_batch = needs_batch
        self.adds_all_first = adds_all_first or needs_batch
        self.terms: list[Term] = []
        """The losses that were added."""
        self._relative: list[tuple[float, float]] = []
        self._reference: int | None = None
        self._fits = True  # whether weighted losses make up what they combine to

    def add(self, term: Term) -> tuple[Term, Rule | None]:
        """Add the loss of the next micro-batch; to be called in order.

        Returns:
            The loss and the rule by which it combines with those of the other micro-batches.
        """
        index = len(self.terms)
        self.terms.append(term)
        if self.needs_batch:
            return term, self._rule
        compared = [index] if self._reference is None else [self._reference, index]
        weights = self._weights(
            [self.terms[each] for each in compared], [self._sizes[each] for each in compared]
        )
        self._relative.append((weights[-1], weights[0]))
        if self._reference is None and weights[-1]:
            self._reference = index
        if self._rule is None and not self._fits:
            return Leaf(term.value), "samples"
        return term, self._rule

    def weighted(self, index: int, loss: Tensor, sources: Sequence[Tensor]) -> Tensor | None:
        """What is differentiated of a micro-batch; its gradient is that part of the batch's.

        Args:
            index: of the micro-batch.
            loss: its loss.
            sources: the numbers from which the loss was computed, if gradients need the batch.

        Returns:
            A scalar; None of a micro-batch that counts for nothing, such as padding, whose loss may
            be NaN.
        """
        if not self.needs_batch:
            weight = self.weight(index)
            if self.adds_all_first:
                weight *= self._correction()
            return loss * weight if weight else None
        if self._slopes is None:  # Then losses are averaged over samples.
            return loss * (self._sizes[index] / self._size_of_batch)
        return along(sources, self._slopes[index])

    def weight(self, index: int) -> float:
        """The provisional weight of a micro-batch whose loss was added.

        While denominators are proportional to samples, it equals to the bit the fraction of the
        samples in the micro-batch: quotients of whole numbers are rounded once. A micro-batch
        whose denominator is zero has no weight; if all are zero, the last one is differentiated,
        which gives gradients of zero or NaN as on one process.
        """
        if self._adds_up:
            return 1.0
        if self._reference is None:
            is_last = index == len(self._sizes) - 1
            share = self._sizes[index] / self._size_of_batch
            return share if is_last and not self._denominator[1] else 0.0
        own, reference = self._relative[index]
        if not own:
            return 0.0
        return own * self._sizes[self._reference] / (reference * self._size_of_batch)

    def factor(self) -> float:
        """What the gradients of all have to be multiplied by; known after the last was added."""
        if self.needs_batch:
            _ = self._everyone  # Other replicas may wait for this one, which has no micro-batch.
        return 1.0 if self.adds_all_first else self._correction()

    def _correction(self) -> float:
        """What all provisional weights have to be multiplied by."""
        of_reference, total = self._denominator
        if self._reference is None or self._adds_up:
            return 1.0
        return of_reference * self._size_of_batch / (self._sizes[self._reference] * (total or 1.0))

    @property
    def _adds_up(self) -> bool:
        """Whether the losses that were added are sums."""
        return bool(self.terms) and self._rule_of(self.terms, self._sizes) == "sum"

    def _rule_of(self, terms: Sequence[Term], sizes: Sequence[float]) -> Rule:
        """How losses combine, as the first batch has shown, or they show."""
        return own_rule(terms, sizes[: len(terms)]) if self._rule is None else self._rule

    def _weights(self, terms: Sequence[Term], sizes: Sequence[float]) -> list[float]:
        """The weights of micro-batches in a batch that is made of them, up to a common factor."""
        rule = self._rule_of(terms, sizes)
        if not isinstance(rule, str):
            weights = shares(terms, sizes, rule)
            if weights is not None:
                return weights
            self._fits, total = False, sum(sizes)
            return [size / total for size in sizes]
        if rule == "sum":
            return [1.0] * len(terms)
        return _counts(terms, sizes) if rule == "mean" or self._rule is None else list(sizes)

    @cached_property
    def _slopes(self) -> list[list[Tensor]] | None:
        """By how much the batch's loss changes with the numbers of each micro-batch here.

        None if it does not, or was computed in another way than the rule says.
        """
        terms, sizes, first = self._everyone
        found = slopes(terms, sizes, self._rule_of(terms, sizes))
        if found is None or not any(slope.any() for each in found for slope in each):
            return None
        return found[first : first + len(self.terms)]

    @cached_property
    def _denominator(self) -> tuple[float, float]:
        """The weights of the reference and of the whole batch; collective when first asked for."""
        terms, sizes, first = self._everyone
        weights = self._weights(terms, sizes) if terms else [0.0]
        is_share = bool(terms) and not isinstance(self._rule_of(terms, sizes), str)
        reference = 0.0 if self._reference is None else weights[first + self._reference]
        return reference, float(any(weights)) if is_share else sum(weights)

    @cached_property
    def _everyone(self) -> tuple[list[Term], list[float], int]:
        """The losses of the whole batch, their samples, and the place of the first of this replica.

        Collective when first asked for.
        """
        mine = [term.to("cpu") for term in self.terms] if self._replicas else self.terms
        everyone = all_gather((mine, list(self._sizes)), self._replicas)
        terms = [term for theirs, _ in everyone for term in theirs]
        sizes = [size for _, of_rank in everyone for size in of_rank]
        rank = 0 if self._replicas is None else dist.get_rank(self._replicas)
        return terms, sizes, sum(len(theirs) for theirs, _ in everyone[:rank])


def along(sources: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor | None:
    """A scalar whose gradient by each of some numbers is given; None where all are zero."""
    parts = [
        (source * gradient.to(source)).sum()
        for source, gradient in zip(sources, gradients, strict=True)
        if gradient.any()  # That of a mean over padding, which is NaN, is zero.
    ]
    return sum(parts[1:], parts[0]) if parts else None


def _counts(terms: Sequence[Term], sizes: Sequence[float]) -> list[float]:
    """The denominators of means.

    One that is unknown has as many entries a sample as the first that is known.
    """
    leaves = [term if isinstance(term, Leaf) else Leaf(term.value) for term in terms]
    of_sample = (
        leaf.count / size
        for leaf, size in zip(leaves, sizes, strict=True)
        if leaf.kind == "mean" and leaf.count
    )
    entries = next(of_sample, 1.0)
    return [
        leaf.count if leaf.kind == "mean" else 0.0 if leaf.is_empty else entries * size
        for leaf, size in zip(leaves, sizes, strict=True)
    ]
