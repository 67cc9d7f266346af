"""Losses that are means or sums over samples are told from those that compare samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse.pipeline.joining import Axis
from lightning_axosparse.pipeline.loss.operators import CONSTANT, ROWS, Note, Total, Unknown
from lightning_axosparse.pipeline.loss.separable import SampleTracker
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.pipeline.rng import SampledNumbers
from lightning_axosparse.support.torch_internals import paused

IGNORED, TOKENS, CLASSES = -100, 4, 5

Step = Callable[[Tensor, Tensor], Any]
"""Computes a value of logits ``(samples, tokens, classes)`` and labels ``(samples, tokens)``."""

WEIGHTS = nn.Parameter(torch.linspace(0.5, 2, CLASSES, dtype=torch.float64))
BUFFER = torch.rand(CLASSES, dtype=torch.float64)


def each_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.mT, y, reduction="none")


def kept(y: Tensor) -> Tensor:
    return y != IGNORED


def classes(y: Tensor) -> Tensor:
    return y.clamp(min=0)


def with_mask(x: Tensor, mask: Tensor) -> Tensor:
    return (x[mask].sum(-1) * x[mask].mean(-1)).mean()


def halves(x: Tensor) -> Tensor:
    one, other = torch.cat([x, x * 2]).chunk(2)
    return F.mse_loss(one, other)


def padded(x: Tensor, y: Tensor) -> float:
    return float(kept(y).sum())


def entries(of_sample: int) -> Callable[[Tensor, Tensor], float]:
    return lambda x, y: float(of_sample * len(x))


MEANS: dict[str, tuple[Step, Callable[[Tensor, Tensor], float]]] = {
    "mean": (lambda x, y: x.mean(), entries(20)),
    "negative": (lambda x, y: 3 - x.mean() * 2 / 5, entries(20)),
    "mean of sums": (lambda x, y: x.sum((1, 2)).mean(), entries(1)),
    "over samples first": (lambda x, y: x.mean(0).mean(), entries(1)),
    "sum over samples": (lambda x, y: x.sum() / len(x), entries(1)),
    "sum over entries": (lambda x, y: x.pow(2).sum() / x.numel(), entries(20)),
    "squares": (lambda x, y: F.mse_loss(x, x * 2), entries(20)),
    "logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
        entries(20),
    ),
    "divergence": (
        lambda x, y: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
        entries(1),
    ),
    "triplets": (lambda x, y: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]), entries(1)),
    "cosines of a sample": (lambda x, y: F.cosine_similarity(x[:, 0], x[:, 1]).mean(), entries(1)),
    "products with a constant": (lambda x, y: (x @ WEIGHTS[:, None]).mean(), entries(4)),
    "accuracy": (lambda x, y: (x.argmax(-1) == y).double().mean(), entries(4)),
    "one entry of each row": (
        lambda x, y: x.mean(1).gather(1, classes(y[:, :1])).mean(),
        entries(1),
    ),
    "one hot": (lambda x, y: (F.one_hot(classes(y), CLASSES) * x).sum(-1).mean(), entries(4)),
    "two alike": (lambda x, y: x.mean() + 0.3 * x.abs().mean(), entries(20)),
    "stacked": (lambda x, y: torch.stack([x.mean(), x.abs().mean()]).sum(), entries(20)),
    "a loop over tokens": (lambda x, y: sum(x[:, i].mean() for i in range(4)), entries(5)),
    "detached": (lambda x, y: x.mean().detach().clone(), entries(20)),
    "a penalty": (lambda x, y: x.mean() + 0.1 * WEIGHTS.pow(2).sum() + BUFFER.max(), entries(20)),
    "cross entropy": (lambda x, y: F.cross_entropy(x.mT, y), padded),
    "next tokens": (
        lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)),
        lambda x, y: padded(x, y[:, 1:]),
    ),
    "flat cross entropy": (lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), padded),
    "weights of classes": (
        lambda x, y: F.cross_entropy(x.mT, y, WEIGHTS.detach()),
        lambda x, y: float((WEIGHTS.detach()[classes(y)] * kept(y)).sum()),
    ),
    "by hand": (lambda x, y: (each_loss(x, y) * kept(y)).sum() / kept(y).sum(), padded),
    "by hand, not zero": (lambda x, y: each_loss(x, y).sum() / (kept(y).sum() + 1e-9), padded),
    "at least one": (lambda x, y: each_loss(x, y).sum() / kept(y).sum().clamp(min=1), padded),
    "chosen": (lambda x, y: each_loss(x, y)[kept(y)].mean(), padded),
    "chosen twice by one mask": (lambda x, y: with_mask(x, kept(y)), padded),
    "weighted": (
        lambda x, y: (x * x.abs()).sum() / x.detach().abs().sum(),
        lambda x, y: float(x.abs().sum()),
    ),
}
"""Means over samples, with their denominators."""

SUMS: dict[str, Step] = {
    "sum": lambda x, y: x.pow(2).sum() * 2,
    "cross entropy": lambda x, y: F.cross_entropy(x.mT, y, reduction="sum"),
    "difference": lambda x, y: x.sum() - x.abs().sum(),
    "count": lambda x, y: (x.argmax(-1) == y).sum(),
    "over a constant": lambda x, y: x.sum() / 0.7,
    "nothing": lambda x, y: 0 * x.sum(),
}

UNKNOWN: dict[str, tuple[Step, str]] = {
    "exponential": (lambda x, y: x.mean().exp(), "exp"),
    "variance": (lambda x, y: x.var(), "var"),
    "normalised": (lambda x, y: (x - x.mean(0)).pow(2).mean(), "sub"),
    "norm": (lambda x, y: x.norm(), "norm"),
    "largest": (lambda x, y: x.max() + x.mean() * 0, "max"),
    "hardest": (lambda x, y: x.flatten().topk(3).values.mean(), "topk"),
    "softmax over samples": (lambda x, y: x.softmax(0).mean(), "softmax"),
    "product": (lambda x, y: x.mean() * x.abs().mean(), "mul"),
    "ratio": (lambda x, y: x.mean() / x.abs().mean(), "div"),
    "a denominator with a gradient": (lambda x, y: x.sum() / x.abs().sum(), "div"),
    "a mean and a sum": (lambda x, y: x.mean() + x.sum(), "add"),
    "loss of means": (lambda x, y: F.mse_loss(x.mean(0), torch.zeros(4, 5)), "mse_loss"),
    "every two samples": (lambda x, y: (x.flatten(1) @ x.flatten(1).T).exp().mean(), "not known"),
    "distances": (lambda x, y: torch.cdist(x[:, 0], x[:, 0]).mean(), "cdist"),
    "two masks": (lambda x, y: (x[kept(y)] + x[~kept(y)].sum()).mean(), "add"),
    "at least fifty": (lambda x, y: x.sum() / kept(y).sum().clamp(min=50), "clamp"),
    "two views": (lambda x, y: halves(x), "split"),
    "rows by number": (
        lambda x, y: x.mean(1)[torch.arange(len(x)), classes(y[:, 0])].mean(),
        "index",
    ),
    "a rounded mean": (lambda x, y: x.mean().long() + 0.0, "to_copy"),
    "a rounded quotient": (lambda x, y: torch.div(x.sum(), 2, rounding_mode="floor"), "div"),
    "what is written among rows": (
        lambda x, y: x.clone().index_add_(0, torch.zeros(len(x), dtype=torch.long), x).mean(),
        "index_add",
    ),
    "counted classes": (
        lambda x, y: F.cross_entropy(
            x.mT, y, 1 / torch.bincount(classes(y).flatten(), minlength=5).double().clamp(min=1)
        ),
        "bincount",
    ),
    "weights of the batch": (
        lambda x, y: F.binary_cross_entropy_with_logits(
            x, (x > 0).double(), pos_weight=(x < 0).sum() / (x > 0).sum()
        ),
        "binary_cross_entropy_with_logits",
    ),
    "rolled": (lambda x, y: F.mse_loss(x, x.roll(1, 0)), "roll"),
    "shuffled": (lambda x, y: F.mse_loss(x, x[torch.randperm(len(x))]), "draws random numbers"),
    "noise": (lambda x, y: (x + torch.randn_like(x)).mean(), "draws random numbers"),
    "a number": (lambda x, y: x.mean() / abs(x.detach().mean().item()), "takes numbers out"),
    "a number of tokens": (lambda x, y: x.sum() / max(1, int(kept(y).sum())), "takes numbers out"),
    "means of unlike numbers": (
        lambda x, y: F.cross_entropy(x.mT, y) + x.mean(),
        "means over different numbers",
    ),
    "a sum stacked with a penalty": (
        lambda x, y: torch.stack([x.sum(), WEIGHTS.sum()]).sum(),
        "stack",
    ),
    "a sum and a penalty": (lambda x, y: x.sum() + WEIGHTS.sum(), "add"),
}
"""What is no mean or sum over samples, and a part of the reason that is given."""


def microbatches(sizes: Sequence[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        x = torch.randn(size, TOKENS, CLASSES, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (size, TOKENS), generator=generator)
        y[torch.rand(size, TOKENS, generator=generator) < 0.4] = IGNORED
        made.append((x, y))
    return made


def run(
    tracker: SampleTracker,
    step: Step,
    x: Tensor,
    y: Tensor,
    numbers: SampledNumbers | None = None,
) -> Tensor:
    """The loss of a micro-batch whose logits come from a layer."""
    tracker.begin(len(x), numbers)
    tracker.add(y, Axis(0))
    tracker.begin_end()
    tracker.add(x, Axis(0))
    with tracker:
        return torch.as_tensor(step(x, y))


def followed(
    step: Step, parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[LossWeights, list[Note], Tensor, list[Tensor]]:
    """What is found of a step, with the loss of the batch and gradients of logits by it."""
    tracker = SampleTracker([BUFFER])
    weights = LossWeights([len(x) for x, _ in parts])
    notes, losses, logits = list[Note](), list[Tensor](), list[Tensor]()
    for x, y in parts:
        logits.append(x.clone().requires_grad_())
        losses.append(run(tracker, step, logits[-1], y))
        notes.append(tracker.note_of(losses[-1]))
        weights.add(notes[-1])
    for number, loss in enumerate(losses):
        if loss.requires_grad and weights.weight(number):
            (loss * weights.weight(number) * weights.factor()).backward()
    gradients = [x.new_zeros(x.shape) if x.grad is None else x.grad for x in logits]
    return weights, notes, weights.combined([loss.detach() for loss in losses]), gradients


def assert_as_the_whole_batch(step: Step, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compare the loss that micro-batches make up, and its gradient, with those of the batch."""
    weights, _, loss, gradients = followed(step, parts)
    assert weights.problem == ""
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    expected = torch.as_tensor(step(x.requires_grad_(), y))
    # The loss of padding alone is NaN, on one process, too.
    precise = partial(torch.testing.assert_close, atol=1e-12, equal_nan=True)
    precise(loss, expected.detach(), rtol=1e-12, check_dtype=False)
    if expected.requires_grad:
        (gradient,) = torch.autograd.grad(expected, x)
        precise(torch.cat(gradients), gradient, rtol=1e-10)


SIZES = pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (1, 1, 1), (4, 3, 3)])


@SIZES
@pytest.mark.parametrize("name", MEANS)
def test_means_over_samples_are_found_with_their_denominators(
    name: str, sizes: Sequence[int]
) -> None:
    step, count = MEANS[name]
    parts = microbatches(sizes)
    _, notes, _, _ = followed(step, parts)
    for note, (x, y) in zip(notes, parts, strict=True):
        assert isinstance(note, Total)
        assert note.kind == "mean"
        assert list(note.denominators) == pytest.approx([count(x, y)], rel=1e-12)
    assert_as_the_whole_batch(step, parts)


@SIZES
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_samples_are_found(name: str, sizes: Sequence[int]) -> None:
    parts = microbatches(sizes)
    _, notes, _, _ = followed(SUMS[name], parts)
    assert {note.kind for note in notes if isinstance(note, Total)} == {"sum"}
    assert_as_the_whole_batch(SUMS[name], parts)


@SIZES
@pytest.mark.parametrize("name", UNKNOWN)
def test_anything_else_is_unknown_and_it_is_said_why(name: str, sizes: Sequence[int]) -> None:
    step, reason = UNKNOWN[name]
    weights, *_ = followed(step, microbatches(sizes))
    assert reason in weights.problem


def test_samples_along_another_dimension_are_unknown() -> None:
    weights, *_ = followed(lambda x, y: x.transpose(0, 1).mean(), microbatches([2, 2]))
    assert "transpose" in weights.problem


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_what_is_found_of_any_micro_batches_is_right(sizes: list[int], seed: int) -> None:
    """Of single samples it may not be seen how they lie, but never is something wrong found."""
    parts = microbatches(sizes, seed)
    if not all(bool(kept(y).any()) for _, y in parts):
        return
    for step in (*(step for step, _ in MEANS.values()), *SUMS.values()):
        if not followed(step, parts)[0].problem:
            assert_as_the_whole_batch(step, parts)


@pytest.mark.parametrize("name", ["cross entropy", "weights of classes"])
def test_a_micro_batch_of_padding_counts_for_nothing(name: str) -> None:
    parts = microbatches([2, 2, 3])
    for number in (0, 2):
        parts[number][1].fill_(IGNORED)
        assert_as_the_whole_batch(MEANS[name][0], parts)


def test_a_denominator_is_unknown_where_its_minimum_counts() -> None:
    step, _ = MEANS["at least one"]
    parts = microbatches([2, 3])
    parts[1][1].fill_(IGNORED)
    weights, notes, *_ = followed(step, parts)
    assert isinstance(notes[0], Total)
    assert isinstance(notes[1], Unknown)
    assert "clamp" in weights.problem


@pytest.mark.parametrize(
    "vote",
    [
        lambda x: (x > 0).all(),
        lambda x: not (x < 0).any(),
        lambda x: (x > 0).sum() == x.numel(),
    ],
)
def test_a_vote_of_samples_is_noted(vote: Any) -> None:
    tracker, y = SampleTracker(), microbatches([2])[0][1]
    found: dict[str, int] = {}
    for name, x in (
        ("all", torch.ones(2, 4)),
        ("all again", torch.rand(2, 4) + 1),
        ("not all", -torch.ones(2, 4)),
    ):
        step = lambda x, y: (2 if vote(x) else 3) * x.mean()  # noqa: E731
        loss = run(tracker, step, x.double(), y)
        assert isinstance(tracker.note_of(loss), Total)
        found[name] = tracker.functions
    assert found["all"] == found["all again"] != found["not all"]


def test_the_classes_that_one_hot_finds_by_itself_are_noted() -> None:
    tracker, x = SampleTracker(), torch.ones(2, 3)

    def programs(count: int) -> list[int]:
        found = []
        for y in ([[0, 1, 2], [0, 0, 0]], [[2, 2, 2], [2, 2, 2]], [[0, 1, 3], [0, 0, 0]]):
            loss = run(
                tracker,
                lambda x, y: (F.one_hot(y, count) * x[..., None]).mean(),
                x,
                torch.tensor(y),
            )
            assert isinstance(tracker.note_of(loss), Total)
            found.append(tracker.program)
        return found

    assert len({*programs(4)}) == 1
    one, alike, other = programs(-1)
    assert one == alike != other


def test_nothing_is_known_of_a_step_that_decides_by_values_of_samples() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss, other = x.mean(), x.sum()
        return loss if loss > other else other

    ((x, y),) = microbatches([3])
    tracker = SampleTracker()
    note = tracker.note_of(run(tracker, step, x, y))
    assert note == Unknown("it decides by values of the samples")
    by_weights = lambda x, y: x.mean() if WEIGHTS.sum() > 0 else x.sum()  # noqa: E731
    assert isinstance(tracker.note_of(run(tracker, by_weights, x, y)), Total)


def test_nothing_is_known_of_a_step_that_writes_to_a_tensor_of_the_module() -> None:
    buffer = torch.zeros(CLASSES, dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = x.mean()
        buffer[:].mul_(0.9).add_(x.mean((0, 1)))
        return loss

    ((x, y),) = microbatches([3])
    tracker = SampleTracker([buffer])
    note = tracker.note_of(run(tracker, step, x, y))
    assert isinstance(note, Unknown)
    assert "writes to a tensor of the module" in note.reason


def test_numbers_of_samples_are_rows_where_the_batch_has_them() -> None:
    numbers, tracker = SampledNumbers(4), SampleTracker()
    ((x, y),) = microbatches([2])
    step = lambda x, y: (x + torch.randn_like(x)).mean()  # noqa: E731
    with numbers.of(2, 4), numbers:
        loss = run(tracker, step, x, y, numbers)
    assert tracker.note_of(loss) == Total("mean", frozenset([40.0]))


def test_functions_and_numbers_tell_steps_apart() -> None:
    tracker, parts = SampleTracker(), microbatches([2, 2, 3])
    found = []
    for factor, (x, y) in zip((2.0, 2.0, 2.0), parts, strict=True):
        run(tracker, lambda x, y, factor=factor: x.mean() * factor, x, y)
        found.append((tracker.functions, tracker.program))
    assert len({*found}) == 1
    run(tracker, lambda x, y: x.mean() * 3.0, *parts[0])
    assert tracker.functions == found[0][0]
    assert tracker.program != found[0][1]
    run(tracker, lambda x, y: x.mean() + 2.0, *parts[0])
    assert tracker.functions != found[0][0]


def test_nothing_is_followed_while_paused_until_it_is_said_what_a_result_is() -> None:
    tracker, ((x, y),) = SampleTracker(), microbatches([3])

    def step(x: Tensor, y: Tensor) -> Tensor:
        with paused([tracker]):
            hidden = x.flip(0)
        assert tracker.note_of(hidden) == Unknown()
        tracker.add(hidden, Axis(0))
        assert tracker.note_of(hidden) == ROWS
        return hidden.mean()

    assert tracker.note_of(run(tracker, step, x, y)) == Total("mean", frozenset([60.0]))


@pytest.mark.parametrize("grad", [True, False])
def test_parameters_buffers_and_numbers_are_no_samples(grad: bool) -> None:
    tracker, ((x, y),) = SampleTracker([BUFFER]), microbatches([3])
    for step in (
        lambda x, y: WEIGHTS.norm(),
        lambda x, y: torch.stack([WEIGHTS.pow(2).sum(), BUFFER.sum()]).sum(),
        lambda x, y: torch.tensor(0.0).add_(BUFFER.max()),
        lambda x, y: torch.linspace(0, 1, 3).std(),
    ):
        with torch.set_grad_enabled(grad):
            assert tracker.note_of(run(tracker, step, x, y)) == CONSTANT
