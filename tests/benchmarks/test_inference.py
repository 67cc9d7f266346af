from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.inference.models import models, stored_bytes
from benchmarks.memory.step import masks_of
from lightning_axosparse.examples.gpt import GPT
from tests.ranks import PATIENCE, run_command

PRUNED = ["80% pruned", "90% pruned", "95% pruned"]
NAMES = ["float32", "bfloat16", "int8", *PRUNED, *(f"{name}, int8" for name in PRUNED)]


@pytest.fixture
def small() -> dict[str, GPT]:
    return models(width=64, layers=2)


def table(module, *options):
    """The rows that a measurement prints."""
    small = ["--layers", "1", "--tokens", "3", "--trials", "1"]
    done = run_command([sys.executable, "-m", module, *small, *options], PATIENCE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_every_row_runs_on_a_small_model():
    rows = table("benchmarks.inference", "--width", "32", "--batch", "1", "2")
    assert [row[:2] for row in rows] == [[batch, name] for batch in "12" for name in NAMES]
    for row in rows:
        speedups = dict(zip(NAMES, map(float, row[4:]), strict=False))
        assert all(speedup > 0 for speedup in speedups.values())
        assert speedups.get(row[1], 1) == 1


def test_generate_of_gpt2_runs_on_a_small_model():
    rows = table("benchmarks.inference.gpt2", "--width", "48", "--batch", "2")
    assert [row[1] for row in rows] == [
        "nothing, torch",
        "nothing, oneDNN",
        "blocks",
        "blocks, embedding and head",
    ]
    assert max(float(row[3]) for row in rows[:2]) == 1
    assert all(float(row[3]) > 0 for row in rows)


def test_stored_bytes_are_those_of_weights_and_positions(small):
    entries = sum(parameter.numel() for parameter in small["float32"].parameters())
    matrices = sum(p.numel() for p in small["float32"].parameters() if p.dim() > 1)
    rows = sum(p.shape[0] for p in small["float32"].parameters() if p.dim() > 1)
    embedding = 10_000 * 64
    stored = {name: stored_bytes(model) for name, model in small.items()}
    assert stored["float32"] == 4 * entries
    assert stored["bfloat16"] == 2 * entries
    # Besides the head, int8 has the embedding that was tied to it, in float32.
    assert stored["int8"] == pytest.approx(entries + 4 * embedding, rel=0.05)
    for name, kept in (("80% pruned", 0.2), ("90% pruned", 0.1), ("95% pruned", 0.05)):
        values = 4 * kept * matrices
        assert values < stored[name] < 2 * values  # positions, in less than four bytes each
        positions = stored[name] - values
        # The embedding that was tied to the head has float32 values, and shares its positions.
        expected = positions + kept * (matrices + 4 * embedding) + 8 * rows  # scales and sums
        assert stored[f"{name}, int8"] == pytest.approx(expected, rel=0.05)


def test_pruned_models_decode_as_masked_dense_ones_and_int8_nearly_as_dense(small):
    dense, prompts = small["float32"].eval(), torch.randint(10_000, (4, 1))
    expected = dense.decode(prompts, dense.empty_caches())
    quantized = small["int8"].eval()
    got = quantized.decode(prompts, quantized.empty_caches())
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.05
    masks = masks_of(dense, 0.9, floor=1.0)
    with torch.no_grad():
        for name, mask in masks.items():
            dense.get_parameter(name).mul_(mask)
    expected = dense.decode(prompts, dense.empty_caches())
    rounded = small["90% pruned, int8"].eval()
    got = rounded.decode(prompts, rounded.empty_caches())
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.05
    pruned = small["90% pruned"].eval()
    torch.testing.assert_close(
        pruned.decode(prompts, pruned.empty_caches()), dense.decode(prompts, dense.empty_caches())
    )
