from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_axosparse.pipeline.generators import Generators
from lightning_axosparse.pipeline.rng import PipelineRNG, SampledNumbers
from lightning_axosparse.support.torch_internals import paused

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def pipeline_rng(part: int | None = None) -> PipelineRNG:
    return PipelineRNG(7, CPU, part)


def numbers(rng: PipelineRNG, microbatch: int, stage: int) -> list[tuple[float, float, float]]:
    """What a micro-batch draws on a stage, outside and then inside the layers."""
    rng.begin_run()
    outside = draw()
    rng.seed_layers(microbatch, stage)
    return [outside, draw()]


def test_runs_of_a_batch_draw_alike_outside_the_layers_and_differ_inside() -> None:
    stages, drawn = [pipeline_rng() for _ in range(3)], []
    for stage, rng in enumerate(stages):
        with rng.batch():
            drawn += [numbers(rng, microbatch, stage) for microbatch in range(2)]
    expected = draw()
    outside, inside = ({each[place] for each in drawn} for place in range(2))
    assert outside == {expected}, "as one process for the batch"
    assert len(inside) == 6, "one for each micro-batch and stage"
    assert expected not in inside


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("before", [0, 1], ids=["", "a normal number is left"])
@pytest.mark.parametrize(
    "draw_one",
    [np.random.rand, np.random.randn, lambda: np.random.randint(7), lambda: np.random.bytes(1)],
)
def test_each_draw_from_numpys_generator_shows_and_is_undone(
    generator: Any, before: int, draw_one: Callable[[], Any]
) -> None:
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(generator(3))  # type: ignore[attr-defined]
    try:
        np.random.randn(before)
        state = Generators(CPU)
        assert state.match_python_and_numpy()
        expected = [draw_one(), np.random.randn(), np.random.randn()]
        state.restore(CPU)
        assert state.match_python_and_numpy()
        assert draw_one() == expected[0]
        assert not state.match_python_and_numpy()
        assert [np.random.randn(), np.random.randn()] == expected[1:]
        assert state == state
        assert state != Generators(CPU)
    finally:
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]


def test_batches_differ_inside_the_layers_and_runs_repeat() -> None:
    def run() -> list[list[tuple[float, float, float]]]:
        rng, drawn = pipeline_rng(), []
        for _ in range(2):
            with rng.batch():
                drawn.append(numbers(rng, 0, 1)[1:])
        return drawn

    first, second = run()
    assert first != second
    assert run() == [first, second]


def state() -> tuple[list[int], list[int], object]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_the_global_generators_are_restored() -> None:
    rng, before = pipeline_rng(), state()
    with rng.batch():
        numbers(rng, 0, 1)
        assert state() != before
    assert state() == before


def test_generators_are_left_as_the_run_that_counts_has_left_them_on_every_rank() -> None:
    before = state()
    torch.manual_seed(0)
    last, other = pipeline_rng(), pipeline_rng()
    with last.batch():
        assert last.keep() is None, "nothing was drawn"
        numbers(last, 0, 1)
        last.begin_run()
        draw()
        left, kept = state(), last.keep()
        numbers(last, 0, 1)
    assert state() == left != before
    with other.batch():
        numbers(other, 0, 0)
        other.adopt(pickle.loads(pickle.dumps(kept)))
    assert state() == left


@pytest.mark.parametrize("draws", [lambda: torch.rand(()), random.random, np.random.rand])
def test_it_is_seen_whether_a_run_draws(draws: Callable[[], Any]) -> None:
    rng = pipeline_rng()
    with rng.batch():
        numbers(rng, 0, 0)
        rng.begin_run()
        assert not rng.has_drawn()
        draws()
        assert rng.has_drawn()


def test_replicas_with_the_same_loader_draw_different_numbers_and_leave_the_generators() -> None:
    before, drawn = state(), set()
    for part in range(3):
        rng = pipeline_rng(part)
        with rng.batch():
            first, again = (numbers(rng, number, 0)[0] for number in range(2))
            assert again == first, "micro-batches draw alike"
            assert rng.keep() is None
            drawn.add(first)
        assert state() == before
    assert len(drawn) == 3


def test_one_stage_draws_as_without_a_pipeline() -> None:
    rng = pipeline_rng()
    torch.manual_seed(0)
    expected, after = torch.rand(2), torch.get_rng_state()
    torch.manual_seed(0)
    with rng.batch():
        numbers(rng, 0, 0)
        rng.begin_run()
        drawn = torch.stack([torch.rand(()), torch.rand(())])  # outside the layers, and inside
        rng.keep()
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_stages_draw_different_numbers_after_the_passes_of_a_batch() -> None:
    drawn = []
    for stage in range(2):
        rng = pipeline_rng()
        for _ in range(2):
            with rng.batch():
                drawn += numbers(rng, 0, stage)[1:]
            before = torch.get_rng_state()
            with rng.after_passes(stage):
                drawn.append(draw())
            assert torch.equal(torch.get_rng_state(), before)
    assert len(set(drawn)) == len(drawn) == 8


SAMPLES, SIZES = 7, (3, 3, 1)
OWN = torch.Generator()
SAMPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: torch.rand(len(x), 2),
    "like the samples": lambda x: x + torch.randn_like(x),
    "in place": lambda x: torch.empty(2, len(x)).normal_(),
    "several rows a sample": lambda x: torch.randint(9, (3 * len(x),)),
    "with probabilities": lambda x: torch.bernoulli(x),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "two in a row": lambda x: torch.rand(len(x)) + torch.rand(len(x)),
    "by a generator of one's own": lambda x: torch.rand(len(x), generator=OWN),
    "of distributions": lambda x: torch.distributions.Normal(x, 1 + x).rsample(),
}


def parts_of(x: Tensor) -> list[tuple[int, Tensor]]:
    ends = np.cumsum(SIZES)
    return [(int(end) - len(part), part) for end, part in zip(ends, x.split(SIZES), strict=True)]


def sampled(
    step: Callable[[Tensor], Tensor], whole_first: bool
) -> tuple[list[Tensor], Tensor, SampledNumbers]:
    """What micro-batches draw, and what the whole batch does, before them or after them."""
    x, numbers = torch.rand(SAMPLES, 4), SampledNumbers(SAMPLES, CPU)
    before = torch.get_rng_state()

    def run(first: int, part: Tensor) -> Tensor:
        torch.set_rng_state(before)
        with numbers.of(first, first + len(part)), numbers:
            return step(part)

    whole = run(0, x) if whole_first else torch.empty(0)
    drawn = [run(first, part) for first, part in parts_of(x)]
    return drawn, whole if whole_first else run(0, x), numbers


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("whole_first", [True, False])
def test_micro_batches_draw_the_numbers_of_their_samples(name: str, whole_first: bool) -> None:
    drawn, whole, numbers = sampled(SAMPLED[name], whole_first)
    assert numbers.problem is None
    torch.testing.assert_close(torch.cat(drawn, int(name == "in place")), whole, rtol=0, atol=0)
    assert len(whole.unique()) > 1


@pytest.mark.parametrize("whole_first", [True, False])
def test_numbers_without_samples_are_the_same_in_all_runs(whole_first: bool) -> None:
    drawn, whole, numbers = sampled(lambda x: torch.rand(5), whole_first)
    assert all(torch.equal(each, whole) for each in drawn)
    assert numbers.problem is None


@pytest.mark.parametrize(
    "step", [lambda x: torch.randperm(len(x)), lambda x: torch.rand(len(x) ** 2)]
)
def test_numbers_that_belong_to_no_single_sample_are_a_problem(step: Any) -> None:
    assert sampled(step, True)[2].problem is not None


def test_layers_draw_from_states_of_their_own() -> None:
    numbers, layer = SampledNumbers(4, CPU), nn.Dropout()
    torch.manual_seed(0)
    expected = torch.rand(2, 4)

    def run(first: int, end: int, seed: int) -> Tensor:
        torch.manual_seed(0)
        with numbers.of(first, end), numbers:
            one = torch.rand(end - first)
            with paused([numbers]):
                numbers.begin_layers()
                torch.manual_seed(seed)
                layer(torch.ones(end - first, 9))
            return torch.stack([one, torch.rand(end - first)])

    whole = run(0, 4, 1)
    assert torch.equal(whole, expected), "the layer has drawn none of them"
    assert torch.equal(torch.cat([run(0, 2, 2), run(2, 4, 3)], 1), whole)


@pytest.mark.parametrize("draws", [random.random, np.random.rand, np.random.randn])
def test_layers_draw_from_pythons_and_numpys_generators_of_their_own(
    draws: Callable[[], float],
) -> None:
    sampled, rng = SampledNumbers(2, CPU), pipeline_rng()
    outside, inside = [], []
    with rng.batch():
        for microbatch in range(2):
            rng.begin_run()
            with sampled.of(microbatch, microbatch + 1), sampled:
                outside.append(draws())
                with paused([sampled]):
                    sampled.begin_layers()
                    rng.seed_layers(microbatch, 0)
                    inside.append(draws())
                outside.append(draws())
                with paused([sampled]):
                    inside.append(draws())
                outside.append(draws())
    expected = [draws() for _ in range(3)]
    assert outside == [*expected, *expected], "as one process, which draws once a batch"
    assert len({*inside, *expected}) == 7
