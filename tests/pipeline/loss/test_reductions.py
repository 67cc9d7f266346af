from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse.pipeline.loss.combination import Rule, combine, found_rules, own_rule
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker, is_ours, users_frame
from lightning_axosparse.pipeline.loss.terms import Leaf, Term, leaves
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.support.torch_internals import paused

IGNORED = -100
CLASSES = 5

Step = Callable[[Tensor, Tensor], Any]
"""Computes a value of logits ``(samples, tokens, classes)`` and labels ``(samples, tokens)``."""


def each_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.mT, y, reduction="none")


def kept(y: Tensor) -> Tensor:
    return y != IGNORED


def weights() -> Tensor:
    return torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)


EXACT: dict[str, Step] = {
    "cross entropy": lambda x, y: F.cross_entropy(x.mT, y),
    "module": lambda x, y: nn.CrossEntropyLoss(weights())(x.mT, y),
    "smoothed": lambda x, y: F.cross_entropy(x.mT, y, weights(), label_smoothing=0.2),
    "another label is left out": lambda x, y: F.cross_entropy(x.mT, y.clamp(min=0), ignore_index=0),
    "probabilities": lambda x, y: F.cross_entropy(x.mT, x.softmax(-1).mT),
    "negative log-likelihood": lambda x, y: F.nll_loss(x.log_softmax(-1).mT, y, weights()),
    "selected": lambda x, y: F.mse_loss(x[kept(y)], x[kept(y)] * 2),
    "weighted": lambda x, y: F.mse_loss(x, x * 2, weight=(x > 0).double()),
    "selected mean": lambda x, y: each_loss(x, y)[kept(y)].mean(),
    "by hand": lambda x, y: (each_loss(x, y) * kept(y)).sum() / kept(y).sum(),
    "by hand, at least one": lambda x, y: each_loss(x, y).sum() / kept(y).sum().clamp(min=1),
    "by hand, a number": lambda x, y: each_loss(x, y).sum() / max(1, int(kept(y).sum())),
    "by hand, an item": lambda x, y: each_loss(x, y).sum() / max(1, kept(y).sum().item()),
    "by hand, weights": lambda x, y: (x * x.abs()).sum() / x.detach().abs().sum(),
    "summed by torch": lambda x, y: (
        F.cross_entropy(x.mT, y, reduction="sum") / max(1, kept(y).sum().item())
    ),
    "a sample": lambda x, y: F.cross_entropy(x.mT, y, reduction="sum") / len(y),
    "a token": lambda x, y: each_loss(x, y).sum() / y.numel(),
    "mean of sums": lambda x, y: each_loss(x, y).sum(1).mean(),
    "over samples first": lambda x, y: each_loss(x, y).mean(0).mean(),
    "sum": lambda x, y: F.cross_entropy(x.mT, y, reduction="sum"),
    "plain sum": lambda x, y: x.pow(2).sum(),
    "sum over a constant": lambda x, y: F.cross_entropy(x.mT, y, reduction="sum") / 1000,
    "scaled and shifted": lambda x, y: 3 - F.cross_entropy(x.mT, y) * 2 / 5,
    "two alike": lambda x, y: F.cross_entropy(x.mT, y) + 0.3 * F.nll_loss(x.mT, y),
    "stacked": lambda x, y: torch.stack([x.mean(), x.abs().mean()]).sum(),
    "added up": lambda x, y: sum([x.mean(), x.abs().mean()]),
    "detached": lambda x, y: F.cross_entropy(x.mT, y).detach().clone().double(),
    "a number": lambda x, y: F.cross_entropy(x.mT, y).item(),
    "correct": lambda x, y: (x.argmax(-1) == y).sum(),
    "accuracy": lambda x, y: (x.argmax(-1) == y).double().mean(),
    "nothing": lambda x, y: 0 * x.sum(),
    "masked mean over mean": lambda x, y: (
        (each_loss(x, y) * kept(y)).mean() / (kept(y).double().mean())
    ),
}


def microbatches(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        x = torch.randn(size, 4, CLASSES, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (size, 4), generator=generator)
        y[torch.rand(size, 4, generator=generator) < 0.4] = IGNORED
        made.append((x, y))
    return made


def terms(
    step: Step, parts: list[tuple[Tensor, Tensor]], tracker: ReductionTracker | None = None
) -> list[Term]:
    tracker, found = tracker or ReductionTracker(), []
    for x, y in parts:
        with tracker.microbatch(len(x)):
            value = step(x, y)
        found.append(tracker.of(value))
    return found


def sizes_of(parts: list[tuple[Tensor, Tensor]]) -> list[float]:
    return [float(len(x)) for x, _ in parts]


def combined(step: Step, parts: list[tuple[Tensor, Tensor]], rule: Rule | None = None) -> Tensor:
    value = combine(terms(step, parts), sizes_of(parts), rule)
    return torch.as_tensor(value, dtype=torch.float64)


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return x, y


def is_close(value: Any, whole: Term, parts: Any) -> bool:
    ours, theirs = (torch.as_tensor(v, dtype=torch.float64) for v in (value, whole.value))
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, 1e-12, 1e-12)


def rule_of(step: Step, parts: list[tuple[Tensor, Tensor]]) -> Rule | None:
    """The rule that the comparison with the whole batch finds; None if there is none."""
    tracker = ReductionTracker()
    terms(step, parts[:1], tracker)  # as the check, which measures the memory of the first
    (of_batch,), of_parts = terms(step, [joined(parts)], tracker), terms(step, parts, tracker)
    for rule in found_rules(of_batch, of_parts, sizes_of(parts), is_close):
        if is_close(combine(of_parts, sizes_of(parts), rule), of_batch, of_parts):
            return rule
    return None


def whole(step: Step, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return torch.as_tensor(step(x, y), dtype=torch.float64)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sizes", [[2, 2], [3, 2, 1], [1, 1, 1, 1]])
def test_microbatches_combine_to_the_value_of_the_batch(name: str, sizes: list[int]) -> None:
    for seed in range(5):
        parts = microbatches(sizes, seed)
        actual, expected = combined(EXACT[name], parts), whole(EXACT[name], parts)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 1000))
def test_any_sizes_and_paddings(sizes: list[int], seed: int) -> None:
    parts = microbatches(sizes, seed)
    for name in ("smoothed", "by hand, a number", "sum over a constant", "a sample"):
        actual, expected = combined(EXACT[name], parts), whole(EXACT[name], parts)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["cross entropy", "smoothed", "by hand, at least one", "summed by torch", "a sample"]
)
def test_a_microbatch_of_padding_counts_for_nothing(name: str) -> None:
    parts = microbatches([2, 2, 1])
    for padded in (0, 2):
        parts[padded][1].fill_(IGNORED)
        actual, expected = combined(EXACT[name], parts), whole(EXACT[name], parts)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_batch_of_padding_is_what_it_is_on_one_process() -> None:
    parts = microbatches([2, 1])
    for _, y in parts:
        y.fill_(IGNORED)
    assert torch.isnan(combined(EXACT["cross entropy"], parts))
    assert combined(EXACT["by hand, at least one"], parts) == 0


def test_shares_of_samples_are_those_of_samples_to_the_bit() -> None:
    for sizes in ([3, 2], [7, 7, 6], [1, 5, 3]):
        values = [torch.randn((), dtype=torch.float64) for _ in sizes]
        by_tokens = [
            Leaf(value, "mean", 12.0 * size) for value, size in zip(values, sizes, strict=True)
        ]
        unknown = [Leaf(value) for value in values]
        assert combine(by_tokens, sizes) == combine(unknown, sizes)


def one_by_one(x: Tensor, y: Tensor) -> list[Tensor]:
    return [F.cross_entropy(x[i], y[i].clamp(min=0), weights()) for i in range(len(x))]


LOOPS: dict[str, Step] = {
    "sum over samples and tokens": lambda x, y: (x * x).sum() / (len(x) * x.shape[1]),
    "stacked": lambda x, y: torch.stack(one_by_one(x, y)).mean(),
    "stacked and added up": lambda x, y: torch.stack(one_by_one(x, y)).sum(),
    "iterated": lambda x, y: torch.stack([one.pow(2).sum() for one in x]).mean(),
    "unbound": lambda x, y: torch.stack([one.sum() for one in x.unbind()]).mean(),
    "a mean in a loop": lambda x, y: sum(one_by_one(x, y)) / len(x),
    "joined": lambda x, y: torch.cat(
        [one[kept(two)] for one, two in zip(x, y, strict=True)]
    ).mean(),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_samples_follow_the_rule_of_the_first_batch(name: str) -> None:
    rule = rule_of(LOOPS[name], microbatches([2, 2]))
    assert rule is not None
    for sizes in ([3, 3], [2, 2]):
        parts = microbatches(sizes, 7)
        actual, expected = combined(LOOPS[name], parts, rule), whole(LOOPS[name], parts)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def nt_xent(z: Tensor) -> Tensor:
    """SimCLR's loss, with the numbers of the positive pairs as they are often written."""
    scores = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    half = len(z) // 2
    return F.cross_entropy(scores, torch.tensor([*range(half, 2 * half), *range(half)]))


STATISTICS: dict[str, Step] = {
    "exponential": lambda x, y: x.mean().exp(),
    "variance": lambda x, y: x.var(0).mean(),
    "normalised": lambda x, y: (x / x.std(0)).mean(),
    "largest": lambda x, y: x.max() + x.mean() * 0,
    "product": lambda x, y: x.mean() * x.abs().mean(),
    "norm": lambda x, y: x.norm(),
    "ratio": lambda x, y: x.mean() / x.clone().requires_grad_().abs().mean(),
    "overlap": lambda x, y: (2 * x.pow(2).sum() + 1) / (x.abs().sum() + 1),
    "differentiable denominator": lambda x, y: x.sum() / x.clone().requires_grad_().abs().sum(),
    "loss of means": lambda x, y: F.mse_loss(x.mean(0), torch.zeros(x.shape[1:])),
    "balanced by the batch": lambda x, y: F.binary_cross_entropy_with_logits(
        x, (x > 0).double(), pos_weight=(x < 0).sum() / (x > 0).sum()
    ),
    "counted classes": lambda x, y: F.cross_entropy(
        x.mT, y, weight=1 / torch.bincount(y[kept(y)], minlength=CLASSES).double().clamp(min=1)
    ),
    "hardest": lambda x, y: x.flatten().topk(3).values.mean(),
    "sorted": lambda x, y: x.flatten().sort(descending=True)[0][:3].mean(),
    "softmax over samples": lambda x, y: (x.mean((1, 2)).softmax(0) * x.mean((1, 2))).sum(),
    "views": lambda x, y: nt_xent(x.flatten(1).repeat(2, 1)),
    "distances": lambda x, y: (
        (torch.cdist(x[:, 0], x[:, 0]) * (y[:, :1] == y[:, 0])).amax(1).mean()
    ),
    "products": lambda x, y: torch.einsum("ik,jk->ij", x[:, 0], x[:, 0]).exp().mean(),
    "cosines": lambda x, y: F.cosine_similarity(x[:, None, 0], x[None, :, 0], dim=-1).mean(),
    "mean in a power": lambda x, y: (x - x.mean(0)).pow(2).mean(),
}


OF_MEANS = {
    "exponential",
    "product",
    "ratio",
    "overlap",
    "differentiable denominator",
    "loss of means",
}
"""Those that are functions of means and sums, and so follow from those of the batch."""


@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_what_is_a_function_of_means_is_told_from_other_statistics(name: str) -> None:
    parts = microbatches([3, 3])
    rule = rule_of(STATISTICS[name], parts)
    assert (rule is not None) == (name in OF_MEANS or name == "largest")
    if name in OF_MEANS:
        others = microbatches([2, 3, 1], 5)
        # The batch that was compared has shown which dimensions are those of samples.
        tracker = ReductionTracker()
        terms(STATISTICS[name], [*parts, *others], tracker)
        actual = combine(terms(STATISTICS[name], others, tracker), sizes_of(others))
        actual = torch.as_tensor(actual, dtype=torch.float64)
        expected = whole(STATISTICS[name], others)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def mean_in(term: Term) -> Leaf:
    """The first mean that a term was computed from."""
    return next(leaf for leaf in leaves(term) if leaf.kind == "mean")


TOGETHER: dict[str, Step] = {
    "unbound": lambda x, y: F.mse_loss(*x[..., :2].unbind(-1)),
    "first token": lambda x, y: F.mse_loss(x.select(1, 0), x.select(dim=1, index=1)),
    "entry of a parameter": lambda x, y: F.mse_loss(x, 2 * x) * WEIGHTS[0],
    "penalty first": lambda x, y: WEIGHTS.abs().mean() + F.mse_loss(x, 2 * x),
}
WEIGHTS = nn.Parameter(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", TOGETHER)
def test_what_is_no_loop_over_samples_is_followed(name: str) -> None:
    (term,) = terms(TOGETHER[name], microbatches([3]))
    assert mean_in(term).count in (3, 12, 15, 24, 60)


def test_means_over_samples_in_the_second_dimension() -> None:
    tracker = ReductionTracker()
    x = torch.rand(4, 3)
    with tracker.microbatch(3):
        value = x.mean(1).sum()
    assert mean_in(tracker.of(value)).count == 3.0


def test_a_float_that_equals_a_sum_by_chance_is_none() -> None:
    tracker = ReductionTracker()
    with tracker.microbatch(1):
        correct = torch.ones(1).sum().item()
        accuracy = correct / 1
    assert not isinstance(tracker.of(correct), Leaf)
    assert isinstance(tracker.of(accuracy), Leaf)


def test_a_term_of_parameters_alone_does_not_add_up() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + 0.1 * WEIGHTS.pow(2).sum()

    parts = microbatches([2, 3])
    actual, expected = combined(step, parts), whole(step, parts)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


BUFFER = torch.rand(3)
CONSTANTS: dict[str, Callable[[], Any]] = {
    "norm": lambda: WEIGHTS.norm(),
    "mean": lambda: (WEIGHTS * 2).mean(),
    "stacked": lambda: torch.stack([WEIGHTS.pow(2).sum(), BUFFER.sum()]).sum(),
    "added up": lambda: sum(w.abs().sum() for w in (WEIGHTS, BUFFER)),
    "in place": lambda: torch.tensor(0.0).add_(BUFFER.max()),
    "a number": lambda: WEIGHTS.pow(2).sum().item(),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("grad", [True, False])
def test_parameters_and_buffers_are_no_samples(name: str, grad: bool) -> None:
    tracker = ReductionTracker([BUFFER])
    with torch.set_grad_enabled(grad), tracker.microbatch(3):
        value = CONSTANTS[name]()
        penalised = 0.1 * value + torch.rand(3).mean()
    assert float(combine([tracker.of(value)] * 3, [1, 1, 1])) == pytest.approx(
        float(value),
        rel=2**-22,  # rounding of a mean
    )
    assert mean_in(tracker.of(penalised)).count == 3.0


def test_a_padded_microbatch_with_a_penalty_counts_for_nothing() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return 0.1 * WEIGHTS.pow(2).mean() + F.cross_entropy(x.mT, y)

    parts = microbatches([2, 2, 1])
    parts[1][1].fill_(IGNORED)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            actual, expected = combined(step, parts), whole(step, parts)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_an_accuracy_of_single_samples_after_a_number_of_one() -> None:
    def step(x: Tensor, y: Tensor) -> float:
        correct = (x.argmax(-1) == y).all(1)
        correct.sum().item()
        return (correct.sum() / len(y)).item()

    for right in ([True, False, True], [False, False, True, True]):
        parts = microbatches([1] * len(right))
        for (x, y), is_right in zip(parts, right, strict=True):
            y.copy_(x.argmax(-1) if is_right else -y.abs() - 1)
        rule = rule_of(step, parts)
        assert rule is not None
        torch.testing.assert_close(combined(step, parts, rule), whole(step, parts))


def test_nothing_is_followed_outside_or_while_paused() -> None:
    tracker = ReductionTracker()
    x = torch.randn(3)
    before = x.mean()
    with tracker.microbatch(3):
        with paused([tracker]):
            hidden = x.mean()
        seen = x.mean()
    after = x.mean()
    kinds = [tracker.of(value).kind for value in (before, hidden, seen, after)]
    assert kinds == [None, None, "mean", None]
    tracker.forget()
    assert tracker.of(seen).kind is None


def experts(x: Tensor, y: Tensor) -> Tensor:
    """A cross entropy, to which the balance of experts is added in place."""
    loss = F.cross_entropy(x.mT, y)
    p = x.flatten(0, 1).softmax(-1)
    chosen = torch.bincount(p.argmax(-1), minlength=CLASSES)
    loss += 0.1 * CLASSES * (chosen.double() / len(p) * p.mean(0)).sum()
    return loss


SEVERAL: dict[str, Step] = {
    "experts": experts,
    "mean of tokens and mean of samples": lambda x, y: F.cross_entropy(x.mT, y) + x.pow(2).mean(),
    "mean and sum": lambda x, y: x.pow(2).mean() + 0.1 * x.abs().sum(),
    "with a penalty": lambda x, y: x.mean() * x.abs().mean() + 0.1 * WEIGHTS.pow(2).sum(),
    "scaled": lambda x, y: (each_loss(x, y) / kept(y).sum()).sum() * x.pow(2).mean(),
}


@pytest.mark.parametrize("name", SEVERAL)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(0, 1000))
def test_numbers_of_the_batch_give_its_gradient(name: str, sizes: list[int], seed: int) -> None:
    # The step of a whole batch has a tracker of its own here, to which these are samples.
    assume(CLASSES not in (sum(sizes), *sizes))
    step, parts = SEVERAL[name], microbatches(sizes, seed)
    for x, y in parts:
        y[:, 0].clamp_(min=0)
        x.requires_grad_()
    tracker = ReductionTracker()
    total, found, sources = sum(sizes), [], []
    for x, y in parts:
        with tracker.microbatch(len(x), keeps_sources=True):
            loss = step(x, y)
        found.append((tracker.of(loss), loss))
        sources.append(tracker.sources(found[-1][0]))
    rule = rule_of(step, parts)
    weights = LossWeights(sizes, total, rule=rule, needs_batch=True)
    for term, _ in found:
        weights.add(term)
    WEIGHTS.grad = None
    for index, (_, loss) in enumerate(found):
        weighted = weights.weighted(index, loss, sources[index])
        assert weighted is not None
        weighted.backward()
    ours = [x.grad for x, _ in parts], WEIGHTS.grad
    x = torch.cat([x.detach() for x, _ in parts]).requires_grad_()
    WEIGHTS.grad = None
    step(x, torch.cat([y for _, y in parts])).backward()
    torch.testing.assert_close(torch.cat(ours[0]), x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[1], WEIGHTS.grad, rtol=1e-12, atol=1e-12)


def test_what_many_steps_of_time_add_up_is_followed_and_can_be_sent() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for _ in range(500):
            loss = loss + x.mean() * x.square().mean()
        return loss

    parts = microbatches([3, 2])
    (of_batch,), of_parts = terms(step, [joined(parts)]), terms(step, parts)
    sent = pickle.loads(pickle.dumps(of_parts))
    (rule, *_) = found_rules(of_batch, sent, sizes_of(parts), is_close)
    assert rule == own_rule(of_parts, sizes_of(parts))
    assert is_close(combine(sent, sizes_of(parts), rule), of_batch, of_parts)


def test_what_is_used_by_many_calls_is_visited_once() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        value = x.mean()
        for _ in range(60):  # of which a tree has 2 ** 60 leaves
            value = (value + value) / 2
        return value

    parts = microbatches([3, 2])
    found = terms(step, parts)
    assert [len(leaves(term)) for term in found] == [61, 61]  # the mean, and each two
    torch.testing.assert_close(combine(found, sizes_of(parts)), whole(step, parts))


def test_tokens_that_are_one_dimension_with_samples_belong_to_samples() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        return ((tokens - tokens.mean()).abs() + 1).log().mean()

    parts, tracker = microbatches([3, 3]), ReductionTracker()
    terms(step, [joined(parts), *parts], tracker)
    for term in terms(step, parts, tracker):
        assert isinstance(term, Leaf)
        assert term.kind == "mean"


def frame_of(module: str) -> FrameType:
    """A frame of code of a module, called from this one."""
    names = {"__name__": module, "frame": sys._getframe}
    frame: FrameType = eval("(lambda: frame())()", names)
    return frame


@pytest.mark.parametrize(
    ("module", "ours"),
    [
        ("lightning_axosparse.strategy.strategy", True),
        ("lightning_axosparse.examples.gpt", False),
        ("lightning_axosparse_of_a_user", False),
        ("torch.nn.functional", False),
    ],
)
def test_whose_code_has_called(module: str, ours: bool) -> None:
    assert is_ours(frame_of(module)) is ours


def test_the_users_frame_is_found_behind_this_package_and_torch() -> None:
    for module in ("lightning_axosparse.pipeline.engine", "torch.nn.functional"):
        assert users_frame(frame_of(module)).f_code is frame_of.__code__
    assert users_frame(frame_of("a_user")).f_globals["__name__"] == "a_user"
