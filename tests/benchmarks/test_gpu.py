from __future__ import annotations

from itertools import product

import pytest

from benchmarks.gpu import kernels, products, stages, step, training


def table(main, monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["benchmark", "--tiny", *arguments])
    main()
    return cells(capsys.readouterr().out)


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_steps_of_a_small_model(monkeypatch, capsys):
    rows = table(step.main, monkeypatch, capsys, "--trials", "1")
    one_model = [("0%", ""), ("80%", "auto"), ("80%", "samo"), ("90%", "auto"), ("90%", "samo")]
    assert [(row[2], row[3]) for row in rows] == 2 * one_model
    state = {(row[2], row[3]): float(row[7]) for row in rows}
    assert state["0%", ""] == 1
    assert state["90%", "auto"] > state["80%", "auto"] > 3
    assert state["80%", "auto"] > state["80%", "samo"] > 1


def test_kernels_of_a_small_weight(monkeypatch, capsys):
    rows = table(kernels.main, monkeypatch, capsys, "--trials", "1")
    assert [row[2] for row in rows] == 4 * ["segments", "bitmap"]


def test_products_of_a_small_weight(monkeypatch, capsys):
    rows = table(products.main, monkeypatch, capsys, "--trials", "1")
    found = [(row[0], row[1]) for row in rows]
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


def test_two_ranks_keep_to_the_losses_of_one_process(monkeypatch, capsys):
    names = ("one process", "two stages", "two replicas, shard_optimizer", "tensor_parallel")
    monkeypatch.setattr(stages, "ROWS", {name: stages.ROWS[name] for name in names})
    with pytest.raises(SystemExit) as end:
        table(stages.main, monkeypatch, capsys)
    rows = cells("\n\n" + capsys.readouterr().out)
    assert end.value.code == 0, rows
