"""Gradients through the pipeline are those of one process."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.backward.recompute import ActivationCheckpointing
from lightning_axosparse.pipeline.batch import Batch, BatchFingerprint
from lightning_axosparse.pipeline.by_parts import PartedStageStep
from lightning_axosparse.pipeline.choice import InFlightLimit, MemoryInFlightLimit
from lightning_axosparse.pipeline.crossing import message
from lightning_axosparse.pipeline.crossing.message import Crossing, LoopbackLink
from lightning_axosparse.pipeline.joining import Axis, SampleLayouts, learn
from lightning_axosparse.pipeline.microbatch import MicroBatch, split
from lightning_axosparse.pipeline.pipeline import Pipeline
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.pipeline.rng import PipelineRNG, SampledNumbers
from lightning_axosparse.pipeline.schedule import SCHEDULES
from lightning_axosparse.pipeline.shard.partition import balance
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.pipeline.stage_step import StageStep, TrainingStageStep


def pipeline(
    layers: nn.ModuleList | nn.Sequential,
    stages: int,
    schedule: str = "message-driven",
    in_flight: int = 4,
    checkpointing: ActivationCheckpointing | None = None,
    module: nn.Module | None = None,
    outer_parameters: Callable[[], list[nn.Parameter]] = list,
) -> tuple[Pipeline, PipelinedLayers]:
    parts = balance([1] * len(layers), stages)
    names = [f"layers.{i}" for i in range(len(layers))]
    dealt = PipelinedLayers(names, list(layers), parts, checkpointing, module)
    dealt.install(range(stages))
    links = dict(enumerate(LoopbackLink.chain(stages)))
    shared = InFlightLimit(in_flight), lambda value: [value], None, outer_parameters
    pipe = Pipeline(dealt, links, SCHEDULES[schedule], *shared)
    pipe.rng = PipelineRNG(0, torch.device("cpu"))  # type: ignore[attr-defined]
    return pipe, dealt


class NoEffects:
    """Steps do nothing but compute."""

    modes = written = ()

    def discarded(self) -> Any:
        return nullcontext()

    read = counted = behind_layers = discarded

    def of_part(self) -> Any:
        return nullcontext()

    def only_logs_loss(self, output: Any, loss: Tensor) -> bool:
        return True


class Plainly:
    """Differentiates losses as they are."""

    def differentiate(self, loss: Tensor) -> None:
        loss.backward()

    def begin_last(self, deferred: Any = ()) -> None:
        pass

    def mark_final(self, parameter: nn.Parameter) -> None:
        pass


def running_stage(dealt: PipelinedLayers) -> int:
    """The stage whose forward pass runs."""
    assert dealt._current is not None
    return dealt._current.run.stage


def given(pipe: Any, step: Any, batch: Any, microbatches: int) -> Batch:
    parts = split(batch, microbatches)
    return Batch(
        step=step,
        layers=pipe._layers,
        rng=pipe.rng,
        whole=MicroBatch(batch, sum(part.size for part in parts)),
        microbatches=parts,
        fingerprint=BatchFingerprint(),
        effects=NoEffects(),
    )


def training(pipe: Any, step: Any, batch: Any, microbatches: int) -> Batch:
    return replace(given(pipe, step, batch, microbatches), backward=Plainly())


def by_parts(**more: Any) -> Any:
    """What makes the last stage's step where losses are differentiated by parts."""
    settings = {"reduction": "mean", "keeps": False, **more}
    return partial(PartedStageStep, **settings)


def run(pipe: Any, batch: Batch, parted: Any = None) -> TrainingStageStep:
    """Train on a batch; return the last stage's step."""
    if parted is not None:
        numbers = SampledNumbers(batch.whole.size, torch.device("cpu"))
        batch = replace(batch, numbers=dict.fromkeys(range(pipe._stages + 1), numbers))
    with pipe.rng.batch():
        last, rerun = pipe.train(batch, parted)
    assert last is not None
    assert rerun is last.rerun
    return last


class Known(NamedTuple):
    """What is known of a step: what crosses the edges of stages, and how it lies."""

    crossing: Crossing | None = None
    layouts: SampleLayouts = SampleLayouts(one_view=True)
    mixes: bool = False


NOTHING_KNOWN = Known()


def train(
    pipe: Any,
    step: Any,
    batch: Any,
    microbatches: int,
    known: Known = NOTHING_KNOWN,
    parted: bool = False,
) -> Tensor:
    """Train on a batch; return its loss."""
    if parted:
        known = Known(
            known.crossing, SampleLayouts({("output", 0): [Axis(0)], **known.layouts.known})
        )
    elif not pipe.is_divided:
        microbatches = 1
    given = replace(training(pipe, step, batch, microbatches), **known._asdict())
    last = run(pipe, given, by_parts() if parted else None)
    assert last.rerun is None
    if isinstance(last, PartedStageStep):
        return last.loss
    assert isinstance(last.output, Tensor)
    return last.output.detach()


def evaluate(
    pipe: Any, step: Any, batch: Any, microbatches: int, known: Known = NOTHING_KNOWN
) -> Any:
    """What the step returns for the batch."""
    with pipe.rng.batch():
        return pipe.evaluate(replace(given(pipe, step, batch, microbatches), **known._asdict()))


def learned(pipe: Any, step: Any, batch: Any, microbatches: int) -> Known:
    """What runs of the step show of it."""
    parts = given(pipe, step, batch, microbatches)
    with pipe.rng.batch():
        crossing = message.crossing_of(pipe.probe(parts))
    assert crossing is not None
    if microbatches == 1:
        return Known(crossing)
    parts = replace(parts, crossing=crossing)
    with pipe.rng.batch(), torch.no_grad():
        whole, several = (
            pipe.forward(replace(parts, microbatches=each), StageStep)[pipe._stages - 1]
            for each in ([parts.whole], parts.microbatches)
        )
    found, differences = learn(whole.activations[0], several.activations, parts.sizes, 1e-5)
    assert all(by < 1e-5 for _, by in differences)
    return Known(crossing, SampleLayouts(dict(found)))


def differentiate(
    net: Callable[[Any], Tensor], loss: Callable[[Tensor], Tensor], batch: Any, microbatches: int
) -> Tensor:
    """Layers see micro-batches and the loss the batch, without a pipeline."""
    outputs = [net(part.batch) for part in split(batch, microbatches)]
    joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
    value = loss(joined)
    value.backward()
    assert joined.grad is not None
    gradients = joined.grad.split([len(output) for output in outputs])
    for output, gradient in zip(outputs, gradients, strict=True):
        output.backward(gradient)
    return value.detach()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "microbatches", "parted"),
    [
        *((2, 4, False), (4, 8, False), (4, 2, False), (3, 1, False), (5, 5, False)),
        *((1, 4, True), (2, 4, True), (4, 8, True), (4, 2, True), (5, 5, True)),
    ],
)
def test_gradients_are_bit_identical(
    schedule: str, stages: int, microbatches: int, parted: bool
) -> None:
    torch.manual_seed(0)
    # Rows of 64 bytes: the bits of a product depend on how samples are aligned.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5)))
    reference = copy.deepcopy(model)
    batch = x, y = torch.randn(11, 16), torch.randn(11, 16)
    if parted:
        expected = torch.tensor(0.0)
        for part in split(batch, microbatches):
            loss = nn.functional.mse_loss(reference(part.batch[0]), part.batch[1])
            (loss * (part.size / 11)).backward()
            expected += loss.detach() * (part.size / 11)
    else:
        mse = partial(nn.functional.mse_loss, target=y)
        expected = differentiate(reference, mse, x, microbatches)
    pipe, dealt = pipeline(model, stages, schedule)
    step = lambda b: nn.functional.mse_loss(model(b[0]), b[1])  # noqa: E731
    loss = train(pipe, step, batch, microbatches, parted=parted)
    dealt.uninstall()
    assert loss == pytest.approx(expected.item(), abs=1e-7)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("stages", [1, 3])
def test_parameters_before_and_behind_the_layers_get_gradients_of_the_batch(stages: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
            self.before, self.behind = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            return self.behind(self.layers(x - x.mean(0)))

    torch.manual_seed(1)
    net, batch = Net().double(), torch.randn(8, 6).double()
    reference = copy.deepcopy(net)
    reference(batch).pow(3).mean().backward()
    outer = [*net.before.parameters(), *net.behind.parameters()]
    pipe, dealt = pipeline(net.layers, stages, module=net, outer_parameters=lambda: outer)
    if stages > 1:
        unaware = training(pipe, lambda b: net(b).pow(3).mean(), batch, 4)
        assert run(pipe, unaware).rerun is Rerun.MIXES
        assert all(parameter.grad is None for parameter in net.parameters())
    train(pipe, lambda b: net(b).pow(3).mean(), batch, 4, Known(mixes=stages > 1))
    dealt.uninstall()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert torch.equal(net.behind.running_mean, reference.behind.running_mean)


def test_draws_before_the_layers_are_not_taken_for_mixing() -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    pipe, dealt = pipeline(layers, 3)

    def step(x: Tensor) -> Tensor:
        return layers(x + torch.rand(len(x), 1)).mean()

    unaware = training(pipe, step, torch.randn(8, 6), 4)
    assert run(pipe, unaware).rerun is Rerun.DRAWS
    dealt.uninstall()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * mask


class ResidualStack(nn.Module):
    """A ModuleList whose forward passes a mask, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.norm(chain(self, x, mask))


def chain(net: ResidualStack, x: Tensor, mask: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x, mask=mask)
    return x


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
    pipe, dealt = pipeline(model, 2)
    with pytest.raises(MisconfigurationException, match=words):
        train(pipe, lambda b: forward(model, b).mean(), torch.randn(4, 6), 2)
    dealt.uninstall()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_evaluation_may_call_no_layer(stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    pipe, dealt = pipeline(model, stages)
    assert evaluate(pipe, lambda x: "nothing", torch.ones(4, 6), 4) == "nothing"
    dealt.uninstall()


def test_a_batch_runs_undivided_if_some_micro_batches_call_no_layer_in_evaluation() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    batch = torch.arange(4.0).expand(6, 4).t().contiguous()
    for calls in (lambda x: x[0, 0] > 1, lambda x: x[0, 0] < 2):
        pipe, dealt = pipeline(model, 2)
        with pytest.raises(RunAgain) as raised:
            evaluate(pipe, lambda x, calls=calls: model(x) if calls(x) else None, batch, 4)
        assert raised.value.why is Rerun.SAMPLES
        dealt.uninstall()


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
    pipe, dealt = pipeline(model, 4, "1f1b", in_flight=8)
    train(pipe, lambda b: model(b).mean(), torch.randn(8, 6), 8, parted=True)
    dealt.uninstall()
    assert pipe.peak_in_flight == {0: 4, 1: 3, 2: 2, 3: 1}
    for limit in (1, 2, 5):
        pipe, dealt = pipeline(model, 4, in_flight=limit)
        train(pipe, lambda b: model(b).mean(), torch.randn(8, 6), 8, parted=True)
        dealt.uninstall()
        assert max(pipe.peak_in_flight.values()) == limit


def test_all_micro_batches_are_in_flight_where_the_loss_is_differentiated_once() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    pipe, dealt = pipeline(model, 4, in_flight=2)
    train(pipe, lambda b: model(b).mean(), torch.randn(8, 6), 8)
    dealt.uninstall()
    assert set(pipe.peak_in_flight.values()) == {8}


class RecordingDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.masks.append(torch.rand_like(x) > 0.5)
        return x * self.masks[-1]


def test_randomness_is_that_of_one_process_outside_the_layers_and_differs_inside() -> None:
    outside: dict[int, list[Tensor]] = {}

    def masks() -> list[Tensor]:
        model = nn.Sequential(*(RecordingDropout() for _ in range(4)))
        outside.clear()
        pipe, dealt = pipeline(model, 4)

        def step(batch: Tensor) -> Tensor:
            outside.setdefault(running_stage(dealt), []).append(torch.rand(len(batch), 3))
            return model(torch.ones(64, requires_grad=True).expand(len(batch), 64)).sum()

        numbers = dict.fromkeys(range(5), SampledNumbers(4, torch.device("cpu")))
        torch.manual_seed(0)
        run(pipe, replace(training(pipe, step, torch.zeros(4, 1), 2), numbers=numbers))
        dealt.uninstall()
        # The end of the step gives lists of layers what they would have on one process.
        return [mask for layer in model for mask in layer.masks if len(mask) == 2]

    first = masks()
    after = torch.get_rng_state()
    drawn = {stage: [value.clone() for value in values] for stage, values in outside.items()}
    torch.manual_seed(0)
    expected = torch.rand(4, 3)
    for stage in range(4):
        *_, one, two = drawn[stage]
        assert torch.equal(torch.cat([one, two]), expected)
    assert torch.equal(torch.cat(drawn[4]), expected)
    assert len({tuple(m.flatten().tolist()) for m in first}) == 8, "one a layer and micro-batch"
    assert all(torch.equal(a, b) for a, b in zip(masks(), first, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


def test_a_batch_whose_end_draws_for_the_first_time_runs_again() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    pipe, dealt = pipeline(model, 2)
    step = lambda x: model(x).mean() * torch.rand(())  # noqa: E731
    first = run(
        pipe, training(pipe, lambda x: model(x * torch.rand(())).mean(), torch.ones(4, 6), 2)
    )
    assert first.rerun is Rerun.DRAWS
    last = run(pipe, training(pipe, step, torch.ones(4, 6), 2))
    assert last.rerun is None, "nothing is drawn before the layers"
    dealt.uninstall()


class Finals(Plainly):
    """Notes the gradients that are said to be final."""

    def __init__(self) -> None:
        self.deferred: set[nn.Parameter] = set()
        self.final: dict[nn.Parameter, Tensor] = {}

    def begin_last(self, deferred: Any = ()) -> None:
        self.deferred = set(deferred)

    def mark_final(self, parameter: nn.Parameter) -> None:
        assert parameter not in self.final
        self.final[parameter] = parameter.grad.clone()


def test_gradients_of_the_code_before_the_layers_are_final_when_they_are_said_to_be() -> None:
    torch.manual_seed(3)
    net = nn.ModuleDict({"before": nn.Linear(6, 6), "layers": nn.Sequential(nn.Tanh(), nn.Tanh())})
    outer = list(net["before"].parameters())
    pipe, dealt = pipeline(net["layers"], 2, module=net, outer_parameters=lambda: outer)
    finals = Finals()
    step = lambda b: net["layers"](net["before"](b)).pow(2).mean()  # noqa: E731
    run(pipe, replace(training(pipe, step, torch.randn(8, 6), 4), backward=finals))
    dealt.uninstall()
    assert finals.deferred == finals.final.keys() == set(outer)
    for parameter, gradient in finals.final.items():
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("parted", [False, True])
def test_what_each_stage_keeps_of_a_micro_batch_is_measured(parted: bool) -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(3)))
    pipe, dealt = pipeline(model, 3)
    measured = lambda: 10**9, lambda: 0
    limit = MemoryInFlightLimit(3, torch.device("cpu"), *measured, lambda own: [own])
    pipe.limit = limit
    batch = torch.randn(8, 64, requires_grad=True)
    train(pipe, lambda b: model(b).mean(), batch, 4, parted=parted)
    dealt.uninstall()
    one = batch.nbytes // 4
    first, middle, last = (limit._saved_bytes[stage] for stage in range(3))
    assert (first, middle) == (2 * one, 2 * one), "what it sends, and what it has been given"
    assert last >= 2 * one


def test_of_a_layer_that_is_compiled_in_place_its_own_forward_alone_is_compiled() -> None:
    graphs: list[list[Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch.compiler.reset()
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for layer in model:
        layer.compile(backend=backend, dynamic=True)
    pipe, dealt = pipeline(model, 2)
    train(pipe, lambda x: model(x).sum(), torch.randn(6, 6), 3)
    dealt.uninstall()

    assert graphs
    assert all(graph == [nn.functional.linear] for graph in graphs)
