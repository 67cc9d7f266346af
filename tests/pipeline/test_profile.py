"""What a forward pass keeps is counted by storages, however it is kept."""

from __future__ import annotations

import logging
import re
import time
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy, sparsify
from lightning_axosparse.pipeline import profile
from lightning_axosparse.pipeline.profile import StageTimes, activation_bytes, profile_layers
from lightning_axosparse.support import trace
from tests.parity.cases import CLASSES, FEATURES, Net, loader, trainer
from tests.quiet import QUIET
from tests.ranks import run_ranks

CPU = torch.device("cpu")
BATCH, WIDTH = 8, 16
HIDDEN = 4 * BATCH * WIDTH  # bytes


def kept(forward: Any, *received: Tensor) -> int:
    with activation_bytes(CPU, received) as measured:
        output = forward(*received)
        size = measured()
    del output
    return size


def given() -> Tensor:
    return torch.randn(BATCH, WIDTH, requires_grad=True)


def layers(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH), nn.ReLU())


def test_what_is_saved_sent_and_received_counts_once() -> None:
    """The received input, GELU's input and output, and the output, which ReLU saves, too."""
    assert kept(layers(), given()) == 4 * HIDDEN


def test_what_lives_but_a_moment_does_not_count() -> None:
    assert kept(lambda x: x + 1 + 1 + 1, given()) == 2 * HIDDEN
    with torch.no_grad():
        assert kept(layers(), given()) == 2 * HIDDEN


def test_views_of_what_was_there_before_do_not_count() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    batch = torch.randn(100, 4)
    assert kept(lambda: (weight.t(), weight.detach()[:3], batch[10:20].view(-1))) == 0


def test_pruned_weights_count_like_dense_ones_not_at_all() -> None:
    model = layers(4 * WIDTH)
    before = kept(model, given())
    sparsify(model, {n: p > 0 for n, p in model.named_parameters() if p.dim() > 1})
    assert kept(model, given()) == before


def test_checkpointed_layers_keep_their_input() -> None:
    model = layers()
    assert kept(lambda x: checkpoint(model, x, use_reentrant=False), given()) == 2 * HIDDEN


def test_the_pass_computes_what_it_would_have() -> None:
    model, x = nn.Sequential(layers(), nn.Dropout()), given()
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    with activation_bytes(CPU, x):
        assert torch.equal(model(x), expected)


def test_compiled_layers_stay_compiled() -> None:
    runs = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(graph)
            return graph.forward(*args)

        return run

    compiled = torch.compile(layers(), backend=backend)
    kept(compiled, given())
    compiled(given())
    assert len(runs) == 2


@pytest.mark.parametrize("before", [1000, 5000])
def test_a_gpu_counts_for_itself(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    allocated = iter([before, before + 300])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    with activation_bytes(torch.device("cuda:0"), given()) as measured:
        assert measured() == HIDDEN + 300


class Clock:
    """Time that passes in layers alone, forward and back, as much as each of them says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.clock.now += 2 * ctx.seconds
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return Slow.apply(self.dropout(self.norm(self.linear(x))) * scale, self.clock, self.seconds)


class Network(L.LightningModule):
    """Layers of equal size, of which the first takes as long as all others."""

    def __init__(self, clock: Clock, example: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(clock, seconds) for seconds in (6.0, 1.0, 1.0, 2.0, 2.0))
        self.example_input_array = example

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=scale)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return self(x, torch.ones(len(x), 1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.ones(3, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profile, "perf_counter", made)
    return made


def test_a_forward_and_a_backward_pass_are_timed_and_nothing_is_left_behind(clock: Clock) -> None:
    network = Network(clock, example())
    layers = {f"layers.{i}": layer for i, layer in enumerate(network.layers)}
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    seconds = profile_layers(layers, lambda: network(*example()), nullcontext, CPU)
    assert seconds == [18.0, 3.0, 3.0, 6.0, 6.0]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(layer._forward_pre_hooks for layer in network.layers)


def test_a_layer_that_the_example_does_not_reach_is_refused(clock: Clock) -> None:
    network = Network(clock, example())
    layers = {f"layers.{i}": layer for i, layer in enumerate(network.layers)}
    with pytest.raises(MisconfigurationException, match=r"did not call layer 'layers\.0'"):
        profile_layers(layers, lambda: None, nullcontext, CPU)


class Held(L.Callback):
    """Notes which layers' parameters live on this rank."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.layers = sorted({name[:8] for name in trainer.strategy.local_parameters()})


def fit(network: Network, ranks: int = 1, **options: Any) -> tuple[list[str], list[str]]:
    """Train a step; what was logged of the partition, and the layers on this rank."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = rank_zero.log  # of whichever Lightning package was imported last
    logger.addHandler(handler)
    held = Held()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_steps=1,
        **QUIET,
        strategy=AxoSparseStrategy(g_inter=2, microbatches=4, **options),
        callbacks=[held],
    )
    trainer.fit(network, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=8))
    logger.removeHandler(handler)
    return [message for message in logged if " stages: layers" in message], held.layers


def fit_by_time(ranks: int) -> tuple[list[str], list[str]]:
    from lightning_axosparse.pipeline import profile as profile_on_rank

    L.seed_everything(0, verbose=False)
    clock = Clock()
    profile_on_rank.perf_counter = clock
    return fit(Network(clock, example()), ranks, balance="time")


def test_layers_are_partitioned_by_the_time_that_the_first_rank_measures() -> None:
    # The first rank has the last stage.
    (logged, last), (logged_on_second, first) = run_ranks(2, fit_by_time, 2)
    assert first == ["layers.0"]
    assert last == ["layers.1", "layers.2", "layers.3", "layers.4"]
    ((grid, partition, memory),) = (re.split(r"[:;] ", line) for line in logged)
    assert grid == "2 stages"
    assert partition == (
        "layers 'layers.0' to 'layers.4' in 1 + 4, "
        "the largest stage with 1.00 times the mean stage's time"
    )
    assert re.fullmatch(r"[\d,.]+ GB of memory free\.", memory)
    assert logged_on_second == []


@pytest.mark.parametrize(
    ("balance", "parts", "worst"), [("parameters", "2 + 3", 1.2), ([1, 4], "1 + 4", 1.6)]
)
def test_the_expected_imbalance_is_logged(
    clock: Clock, balance: Any, parts: str, worst: float
) -> None:
    ((message,), _) = fit(Network(clock, None), balance=balance, transport="loopback")
    assert f" in {parts}, the largest stage with {worst:.2f} times the mean stage's par" in message


def test_what_cannot_be_timed_is_refused(clock: Clock) -> None:
    with pytest.raises(MisconfigurationException, match="Network on its example_input_array"):
        fit(Network(clock, None), balance="time", transport="loopback")
    with pytest.raises(MisconfigurationException, match="balance='size' must be"):
        AxoSparseStrategy(g_inter=2, balance="size")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (0.009, []),
        (0.002, ["Stage 0 computes 1.7 times as long as the mean stage", "10, 2 ms", "'time'"]),
        (0.05, ["Stage 1 computes 1.7 times as long", "10, 50 ms"]),
    ],
)
def test_the_batches_after_the_first_are_compared_once(
    other: float, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(profile, "rank_zero_info", told.append)
    # Of two ranks, the first of which has the last stage; this is the second one.
    monkeypatch.setattr(profile, "all_gather", lambda own, group: [other, own])
    group: Any = object()
    times = StageTimes(group)
    for batch in range(9):
        with times.batch():
            seconds = 7.0 if batch == 0 else 0.01  # The first batch compiles and allocates.
            trace.clock.add("forward", trace.now(), trace.now() + seconds / 2)
            trace.clock.add("backward", trace.now(), trace.now() + seconds / 2)
            trace.clock.add("wait", trace.now(), trace.now() + 3.0)
    assert len(told) == bool(said)
    assert all(words in text for text in told for words in said)


def test_a_single_stage_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "all_gather", None)
    times = StageTimes(None)
    for _ in range(9):
        with times.batch():
            trace.clock.add("forward", trace.now(), trace.now() + 1.0)


class Sleeps(nn.Linear):
    """A layer of few parameters that takes long."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return super().forward(x)


class Unequal(Net):
    """As a ResNet, whose first layers have few parameters and most of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            Sleeps(FEATURES, 4), nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, CLASSES)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("balance", "lines"), [("parameters", 1), ([1, 3], 0)])
def test_a_run_says_which_stage_computes_longest(
    balance: Any, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    strategy = AxoSparseStrategy(g_inter=2, balance=balance)
    trainer(strategy, 2, callbacks=[]).fit(Unequal(), loader(1))
    said = "".join(capfd.readouterr())
    assert len(re.findall("^Stage 0 computes [^ ]+ times as long", said, re.MULTILINE)) == lines
