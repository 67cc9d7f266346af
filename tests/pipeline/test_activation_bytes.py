"""What a forward pass keeps is counted by storages, however it is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_axosparse import sparsify
from lightning_axosparse.pipeline.activation_bytes import activation_bytes

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
