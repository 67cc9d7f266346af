from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import counted, kernels, step, training
from lightning_axosparse.sparse.store import layout


def table(main, monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["benchmark", "--tiny", *arguments])
    main()
    return cells(capsys.readouterr().out)


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_steps_of_a_small_model(monkeypatch, capsys):
    rows = table(step.main, monkeypatch, capsys, "--trials", "1")
    one_model = [("0%", ""), ("80%", "sparse"), ("80%", "samo"), ("90%", "sparse"), ("90%", "samo")]
    assert [(row[2], row[3]) for row in rows] == 2 * one_model
    state = {(row[2], row[3]): float(row[7]) for row in rows}
    assert state["0%", ""] == 1
    assert state["90%", "sparse"] > state["80%", "sparse"] > 3
    assert state["80%", "sparse"] > state["80%", "samo"] > 1


def test_kernels_of_a_small_weight(monkeypatch, capsys):
    rows = table(kernels.main, monkeypatch, capsys, "--trials", "1")
    assert [row[2] for row in rows] == 4 * ["segments", "bitmap"]


def test_products_of_a_small_weight():
    """In a process of its own: Triton asks whether to interpret when it is first imported."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.gpu.products", "--tiny", "--trials", "1"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found = [(row[0], row[1]) for row in cells(done.stdout)]
    assert found == list(product(["80%", "90%", "95%"], ["1", "4", "16", "64"]))


def test_training_keeps_to_plain_lightnings_losses(monkeypatch, capsys):
    monkeypatch.setattr(training, "ROWS", (training.ROWS[0], training.ROWS[1], training.ROWS[5]))
    with pytest.raises(SystemExit) as end:
        table(training.main, monkeypatch, capsys)
    assert end.value.code == 0


def test_a_row_outside_its_bound_fails(monkeypatch, capsys):
    monkeypatch.setattr(training, "ROWS", (training.ROWS[0],))
    monkeypatch.setattr(training, "difference", lambda one, other: 1.0)
    with pytest.raises(SystemExit) as end:
        table(training.main, monkeypatch, capsys)
    assert end.value.code == 1


def test_what_a_step_holds_is_counted(monkeypatch, capsys):
    monkeypatch.setitem(layout.TILE_ENTRIES, "cpu", layout.TILE_ENTRIES["cpu"])
    rows = table(counted.main, monkeypatch, capsys)
    assert [(row[1], row[2]) for row in rows] == list(product(["yes", "no"], ["0%", "80%", "90%"]))
    for dense, *sparse in (rows[:3], rows[3:]):
        assert 1 == float(dense[5]) < float(sparse[0][5]) < float(sparse[1][5])


def test_a_tensor_counts_while_it_is_alive():
    held = torch.zeros(100)
    with counted.Living([held]) as living:
        assert living.peak == 400
        other = held + 1
        view = other[10:]
        assert living.peak == 800
        del other
        third = held * 2
        assert living.peak == 1200
        del view, third
        held.add_(1)
        held.clone()
    assert living.peak == 1200
