"""What a forward pass keeps is counted by storages, however it is kept."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_axosparse import AxoSparseStrategy, sparsify
from lightning_axosparse.pipeline import profile
from lightning_axosparse.pipeline.profile import StageTimes, activation_bytes
from lightning_axosparse.support import trace
from tests.parity.cases import CLASSES, FEATURES, Net, loader, trainer

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


@pytest.mark.parametrize(
    ("other", "whole", "said"),
    [
        (0.009, 0.018, []),
        (
            *(0.002, 0.011),
            ["Stage 0 computes 1.7 times as long as the mean stage", "10, 2 ms", "balance=["],
        ),
        (0.05, 0.055, ["Stage 1 computes 1.7 times as long", "10, 50 ms"]),
        (0.009, 0.02, ["takes 20 ms", "for 19 ms together: one process would be faster"]),
    ],
)
def test_the_batches_after_the_first_are_compared_once(
    other: float, whole: float, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(profile, "rank_zero_info", told.append)
    # Of two ranks, the first of which has the last stage; this is the second one.
    monkeypatch.setattr(profile, "all_gather", lambda own, group: [[other, whole], own])
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
