"""Gradients through the pipeline are those of one process, to the bit."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.backward.recompute import ActivationCheckpointing
from lightning_axosparse.pipeline.backward.split_layers import SplitLayers
from lightning_axosparse.pipeline.choice import InFlightLimit, ScheduleChoice
from lightning_axosparse.pipeline.crossing.message import Crossing, LoopbackLink
from lightning_axosparse.pipeline.engine import Order, Pipeline
from lightning_axosparse.pipeline.loss.outputs import merge
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.pipeline.microbatch import BatchFingerprint, split
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.schedule import SCHEDULES
from lightning_axosparse.pipeline.shard.partition import balance
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.pipeline.stage_step import Batch, TrainingBatch


def pipeline(
    layers: nn.ModuleList | nn.Sequential,
    stages: int,
    schedule: str = "together",
    in_flight: int = 4,
    checkpointing: ActivationCheckpointing | None = None,
    module: nn.Module | None = None,
) -> tuple[Pipeline, PipelinedLayers]:
    parts = balance([1] * len(layers), stages)
    names = [f"layers.{i}" for i in range(len(layers))]
    dealt = PipelinedLayers(names, list(layers), parts, checkpointing, module)
    split = SplitLayers(layers)
    if SCHEDULES[schedule].defers_weight_gradients:
        split.install()
    dealt.install(range(stages))
    links = dict(enumerate(LoopbackLink.chain(stages)))
    randomness = PipelineRNG(0, stages, torch.device("cpu"))
    limit, tracker = InFlightLimit(in_flight), ReductionTracker()
    choice = ScheduleChoice([schedule], lambda own: [own])
    shared = limit, randomness, tracker, split, lambda value: [value], Order()
    return Pipeline(dealt, links, choice, *shared), dealt


def no_log(size: int, weight: float | None) -> Any:
    """Records nothing."""
    return nullcontext()


class Plainly:
    """Differentiates losses as they are."""

    def differentiate(self, loss: Tensor) -> None:
        loss.backward()

    def begin_last(self, factor: float, deferred: Any = ()) -> None:
        pass

    def mark_final(self, parameter: nn.Parameter) -> None:
        pass


def running_stage(dealt: PipelinedLayers) -> int:
    """The stage whose forward pass runs."""
    assert dealt._running is not None
    return dealt._running.visit.stage


def training(step: Any, batch: Any, microbatches: int) -> TrainingBatch:
    parts = split(batch, microbatches)
    return TrainingBatch(
        step=step,
        microbatches=parts,
        fingerprint=BatchFingerprint(),
        log=no_log,
        weights=LossWeights(sizes := [part.size for part in parts], sum(sizes)),
        backward=Plainly(),
    )


def train(
    pipe: Pipeline, step: Any, batch: Any, microbatches: int, crossing: Crossing | None = None
) -> Tensor:
    given = replace(training(step, batch, microbatches), crossing=crossing)
    last = pipe.train(given)
    assert last is not None
    return merge(last.outputs, given.microbatches)


def evaluate(
    pipe: Pipeline, step: Any, batch: Any, microbatches: int, crossing: Crossing | None = None
) -> list[Any]:
    last = pipe.evaluate(replace(evaluation(step, batch, microbatches), crossing=crossing))
    assert last is not None
    return last.outputs


def evaluation(step: Any, batch: Any, microbatches: int) -> Batch:
    parts = split(batch, microbatches)
    return Batch(step=step, microbatches=parts, fingerprint=BatchFingerprint(), log=no_log)


def learned(pipe: Pipeline, step: Any, batch: Any, microbatches: int) -> Crossing:
    """What a run of the first micro-batch shows of what crosses the edges of stages."""
    crossing = pipe.probe(evaluation(step, batch, microbatches))
    assert crossing is not None
    return crossing


class Tuples(nn.Module):
    """A layer that hands on several tensors, one of which is no float, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Any:
        x, mask, nothing, extra = value
        assert nothing is None
        x = torch.tanh(self.linear(x) * mask)
        return x, mask, None, {"sum": extra["sum"] + x.sum(-1)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 2), (3, 1), (5, 5)])
def test_gradients_are_bit_identical(schedule: str, stages: int, microbatches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(5)))
    reference = copy.deepcopy(model)
    batch = torch.randn(11, 6), torch.randn(11, 6)

    expected = torch.tensor(0.0)
    for part in split(batch, microbatches):
        x, y = part.batch
        loss = nn.functional.mse_loss(reference(x), y) * part.weight
        loss.backward()
        expected = expected + loss.detach()

    pipe, dealt = pipeline(model, stages, schedule)
    loss = train(pipe, lambda b: nn.functional.mse_loss(model(b[0]), b[1]), batch, microbatches)
    dealt.uninstall()
    assert loss == pytest.approx(expected.item(), abs=1e-7)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_any_pytree_crosses_the_edge_of_a_stage() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(Tuples() for _ in range(4)))
    reference = copy.deepcopy(model)
    x, mask = torch.randn(6, 6), torch.rand(6, 6) > 0.3

    def step(net: nn.Module, batch: Any) -> Tensor:
        x, mask = batch
        y, _, _, extra = net((x, mask, None, {"sum": torch.zeros(x.shape[0])}))
        return y.pow(2).mean() + extra["sum"].mean()

    for part in split((x, mask), 3):
        (step(reference, part.batch) * part.weight).backward()
    pipe, dealt = pipeline(model, 4)
    train(pipe, lambda b: step(model, b), (x, mask), 3)
    dealt.uninstall()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Stack(nn.Module):
    """A ModuleList whose forward passes a mask, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask
        return self.norm(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * mask


class ResidualStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.norm(x)


def test_a_module_list_with_a_mask() -> None:
    torch.manual_seed(2)
    model = ResidualStack()
    reference = copy.deepcopy(model)
    batch = torch.randn(8, 6), torch.rand(8, 1)
    for part in split(batch, 4):
        (reference(*part.batch).pow(3).mean() * part.weight).backward()
    pipe, dealt = pipeline(model.layers, 3)
    train(pipe, lambda b: model(*b).pow(3).mean(), batch, 4)
    dealt.uninstall()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: m[3](m[1](m[0](x))), "'layers.3' was called where layer 'layers.2'"),
        (lambda m, x: m(m(x)), "'layers.0' was called where all layers had been called"),
        (lambda m, x: x * 2, "without calling layer 'layers.0'"),
        (lambda m, x: m[1](m[0](m[2](x))), "'layers.2' was called where layer 'layers.0'"),
    ],
)
def test_calls_that_a_pipeline_cannot_follow_are_refused(forward: Any, words: str) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    pipe, _ = pipeline(model, 2)
    with pytest.raises(MisconfigurationException, match=words):
        train(pipe, lambda b: forward(model, b).mean(), torch.randn(4, 6), 2)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_evaluation_may_call_no_layer_for_some_micro_batches(stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    batch = torch.arange(4.0).expand(6, 4).t().contiguous()
    pipe, dealt = pipeline(model, stages)
    outputs = evaluate(pipe, lambda x: model(x) if x[0, 0] > 1 else None, batch, 4)
    dealt.uninstall()
    assert outputs[:2] == [None, None]
    torch.testing.assert_close(torch.cat(outputs[2:]), model(batch[2:]).detach())


def test_an_evaluation_in_which_stages_differ_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for skipping, words in ((0, "'layers.0' on stage 1, and no layer"), (1, "without calling")):
        pipe, dealt = pipeline(model, 2)

        def step(x: Tensor, dealt: Any = dealt, skipping: int = skipping) -> Any:
            return None if running_stage(dealt) == skipping else model(x)

        with pytest.raises(MisconfigurationException, match=words):
            evaluate(pipe, step, torch.randn(4, 6), 2)
        dealt.uninstall()


def test_layers_called_outside_a_step() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    dealt = PipelinedLayers(["a", "b", "c", "d"], list(model), balance([1] * 4, 2))
    dealt.install([1])
    assert model[3](torch.ones(6)).shape == (6,)
    with pytest.raises(RuntimeError, match=r"'a' was called outside.*\['c', 'd'\]"):
        model(torch.ones(6))
    dealt.uninstall()
    assert model(torch.ones(6)).shape == (6,)
    assert all("forward" not in vars(layer) for layer in model)


def test_the_in_flight_limit_bounds_what_stages_hold() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for schedule, expected in (
        ("1f1b", {0: 4, 1: 3, 2: 2, 3: 1}),
        ("gpipe", {0: 8, 1: 8, 2: 8, 3: 8}),
    ):
        pipe, dealt = pipeline(model, 4, schedule, in_flight=8)
        train(pipe, lambda b: model(b).mean(), torch.randn(8, 6), 8)
        dealt.uninstall()
        assert pipe.peak_in_flight == expected
    for limit in (1, 2, 5):
        pipe, dealt = pipeline(model, 4, in_flight=limit)
        train(pipe, lambda b: model(b).mean(), torch.randn(8, 6), 8)
        dealt.uninstall()
        assert max(pipe.peak_in_flight.values()) == limit


class RecordingDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.masks.append(torch.rand_like(x) > 0.5)
        return x * self.masks[-1]


def test_randomness_agrees_outside_the_layers_and_differs_inside() -> None:
    outside: list[Tensor] = []

    def run() -> list[Tensor]:
        model = nn.Sequential(*(RecordingDropout() for _ in range(4)))
        outside.clear()

        def step(batch: Tensor) -> Tensor:
            outside.append(torch.rand(4))
            return model(torch.ones(64, requires_grad=True)).sum()

        pipe, _ = pipeline(model, 4)
        train(pipe, step, torch.zeros(2, 1), 2)
        return [mask for layer in model for mask in layer.masks]

    state = torch.get_rng_state()
    masks = run()
    assert torch.equal(torch.get_rng_state(), state), "the global generator was moved"
    first = [value.clone() for value in outside]
    assert len(outside) == 8
    assert len({tuple(v.tolist()) for v in outside}) == 2, "one draw a micro-batch, on all stages"
    assert len({tuple(m.tolist()) for m in masks}) == 8, "one mask a layer and micro-batch"
    assert all(torch.equal(a, b) for a, b in zip(run(), masks, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, outside, strict=True))


@pytest.mark.parametrize("schedule", ["deferred", "zb-h1"])
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_micro_batches_that_wait_for_weight_gradients_are_in_flight(
    schedule: str, limit: int
) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    pipe, dealt = pipeline(model, 4, schedule, in_flight=limit)
    train(pipe, lambda b: model(b).mean(), torch.randn(8, 6), 8)
    dealt.uninstall()
    assert max(pipe.peak_in_flight.values()) == min(limit, 8 if schedule == "deferred" else 4)


class Finals(Plainly):
    """Notes the gradients that are said to be final."""

    def __init__(self) -> None:
        self.deferred: set[nn.Parameter] = set()
        self.final: dict[nn.Parameter, Tensor] = {}

    def begin_last(self, factor: float, deferred: Any = ()) -> None:
        self.deferred = set(deferred)

    def mark_final(self, parameter: nn.Parameter) -> None:
        assert parameter not in self.final
        self.final[parameter] = parameter.grad.clone()


@pytest.mark.parametrize("schedule", ["deferred", "cooldown"])
@pytest.mark.parametrize("stages", [1, 3])
def test_deferred_gradients_are_final_when_they_are_said_to_be(schedule: str, stages: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.GELU(), nn.Linear(6, 6)) for _ in range(4)))
    pipe, dealt = pipeline(model, stages, schedule, in_flight=6)
    finals = Finals()
    batch = training(lambda b: model(b * b.requires_grad_()).pow(2).mean(), torch.randn(8, 6), 8)
    pipe.train(replace(batch, backward=finals))
    dealt.uninstall()
    assert finals.deferred == set(model.parameters())
    assert finals.final.keys() == finals.deferred
    for parameter, gradient in finals.final.items():
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_layers_leave_no_weight_gradient(every: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4)))
    reference = copy.deepcopy(model)
    batch = torch.randn(8, 6)
    for part in split(batch, 4):
        (reference(part.batch).pow(2).mean() * part.weight).backward()
    checkpointing = ActivationCheckpointing(every, torch.device("cpu"))
    pipe, dealt = pipeline(model, 2, "deferred", checkpointing=checkpointing)
    train(pipe, lambda b: model(b).pow(2).mean(), batch, 4)
    dealt.uninstall()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_layers_that_are_split_themselves_get_their_forward_back() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    split_layers = SplitLayers(model)
    split_layers.install()
    dealt = PipelinedLayers(["a", "b", "c", "d"], list(model), balance([1] * 4, 2))
    dealt.install(range(2))
    dealt.uninstall()
    assert all("forward" in vars(layer) for layer in model)
    split_layers.uninstall()
    assert all("forward" not in vars(layer) for layer in model)
