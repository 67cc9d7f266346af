from __future__ import annotations

import pytest

from benchmarks.overhead import weight_sparse


@pytest.mark.slow
def test_pruned_networks_stand_beside_dense_ones_of_as_many_weights(monkeypatch, capsys):
    arguments = ["--widths", "64", "--ratios", "0.9", "0.98", "--trials", "1"]
    monkeypatch.setattr("sys.argv", ["weight_sparse", *arguments])
    weight_sparse.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [name for name, *_ in rows[:2]] == ["64 wide, dense", "64 wide, 90.0% pruned"]
    dense, ninety, as_ninety, last, as_last = (int(left.replace(",", "")) for _, left, *_ in rows)
    assert ninety == round(0.1 * dense)
    assert last == round(0.02 * dense)
    assert 0.8 * ninety < as_ninety <= ninety
    assert 0.8 * last < as_last <= last
    assert float(rows[1][2]) < 0.25 * float(rows[0][2])
