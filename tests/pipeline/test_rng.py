from __future__ import annotations

import random

import numpy as np
import torch

from lightning_axosparse.pipeline.rng import PipelineRNG

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def numbers(rng: PipelineRNG, microbatch: int, stage: int) -> list[tuple[float, float, float]]:
    """What a micro-batch draws on a stage, outside and then inside the layers."""
    rng.seed_outside_layers(microbatch)
    outside = draw()
    rng.seed_inside_layers(microbatch, stage)
    return [outside, draw()]


def test_numbers_agree_outside_the_layers_and_differ_inside() -> None:
    stages = [PipelineRNG(7, 3, CPU) for _ in range(3)]
    drawn = []
    for stage, rng in enumerate(stages):
        with rng.batch():
            drawn += [numbers(rng, microbatch, stage) for microbatch in range(2)]
    outside = {first for first, _ in drawn}
    inside = {second for _, second in drawn}
    assert len(outside) == 2, "one for each micro-batch"
    assert len(inside) == 6, "one for each micro-batch and stage"
    assert not outside & inside


def test_batches_differ_and_runs_repeat() -> None:
    def run() -> list[list[tuple[float, float, float]]]:
        rng, drawn = PipelineRNG(7, 2, CPU), []
        for _ in range(2):
            with rng.batch():
                drawn.append(numbers(rng, 0, 1))
        return drawn

    first, second = run()
    assert first != second
    assert run() == [first, second]


def test_the_global_generators_are_restored() -> None:
    rng = PipelineRNG(7, 2, CPU)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with rng.batch():
        numbers(rng, 0, 1)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.random.get_state()[1].tolist() == state[2]


def test_one_stage_draws_as_without_a_pipeline() -> None:
    rng = PipelineRNG(7, 1, CPU)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with rng.batch():
        rng.seed_outside_layers(0)
        first = torch.rand(())
        rng.seed_inside_layers(0, 0)
    assert torch.equal(torch.stack([first, torch.rand(())]), expected)


def test_stages_draw_different_numbers_after_the_passes_of_a_batch() -> None:
    drawn = []
    for stage in range(2):
        rng = PipelineRNG(7, 2, CPU)
        for _ in range(2):
            with rng.batch():
                drawn += numbers(rng, 0, stage)
            state = torch.get_rng_state()
            with rng.after_passes(stage):
                drawn.append(draw())
            assert torch.equal(torch.get_rng_state(), state)
    assert len(set(drawn)) == len(drawn) - 2, "only those outside the layers agree"
