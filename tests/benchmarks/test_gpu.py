from __future__ import annotations

from benchmarks.gpu import step


def test_the_script_runs_on_a_small_model(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step", "--tiny", "--trials", "1"])
    step.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["0%", "80%", "90%"]
    dense, *sparse = [float(row[5]) for row in rows]
    assert dense == 1
    assert sparse[0] > 3
    assert sparse[1] > sparse[0]
