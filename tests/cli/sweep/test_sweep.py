"""A sweep from its first job to its report, by the commands of its page in the docs."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from html import escape
from pathlib import Path

import pytest

from lightning_axosparse.cli import sweep as gathering
from lightning_axosparse.cli import train as entry
from lightning_axosparse.cli.job import Job

PAGE = Path(__file__).parents[3] / "docs" / "sweeps.md"
SWEEP, GATHER = re.findall(r"^axosparse-.*$", PAGE.read_text(), re.MULTILINE)
SMALL = [
    *["data.context=16", "data.batch_size=4", "data.max_held_out=4", "data.path=text.txt"],
    *["model.width=8", "model.depth=2", "model.heads=2", "trainer.devices=1"],
    *["trainer.max_epochs=2", "trainer.limit_train_batches=4", "strategy.g_inter=1"],
    "trainer.log_every_n_steps=1",
    *["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"],
    *["seed=0", "~callbacks.timeline", "~callbacks.checkpoint"],
]
ALL = [*SMALL, "pruning.ratio=0.5,0.8", "arm=dense,ticket,random"]
TICKETS = ["ticket-0.5-seed0", "ticket-0.8-seed0"]
JOBS = ["dense-seed0", "random-0.5-seed0", "random-0.8-seed0", *TICKETS]


def run(command: str, others: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process; return its exit code."""
    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [*words, *others])
    main = {"axosparse-train": entry.main, "axosparse-sweep": gathering.main}[words[0]]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_sweep_that_is_stopped_resumed_and_mended(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("If music be the food of love, play on. " * 300)
    train = entry.train
    trained: list[str] = []
    problem: dict[str, BaseException] = {}

    def training(config):
        name = Path(config.folder).name
        trained.append(name)
        if name in problem:
            raise problem[name]
        return train(config)

    monkeypatch.setattr(entry, "train", training)
    folder = Path("sweeps/ratios")

    problem[TICKETS[0]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(SWEEP, ALL, monkeypatch)
    assert trained == ["dense-seed0", TICKETS[0]]
    assert run(GATHER, [], monkeypatch) == 0
    assert "1 of 2 jobs have finished.\nticket-0.5-seed0 has not" in capsys.readouterr().out

    problem = {TICKETS[1]: RuntimeError("A rank has died\nin detail")}
    trained.clear()
    assert run(SWEEP, ALL, monkeypatch) == 1
    assert trained == [*TICKETS, *JOBS[1:3]]  # the dense job had finished
    failed = Job.read(folder / TICKETS[1])
    assert (failed.status, failed.problem) == ("failed", "A rank has died")
    random = Job.read(folder / JOBS[2])
    assert "has failed: A rank has died. Run it again with: axosparse-train" in random.problem
    assert escape(failed.command) in (folder / "sweep.html").read_text()

    problem = {}
    for name in (TICKETS[1], JOBS[2]):
        assert run(Job.read(folder / name).command, [], monkeypatch) == 0
    trained.clear()
    assert run(SWEEP, ALL, monkeypatch) == 0
    assert trained == []
    assert "5 of 5 jobs have finished." in capsys.readouterr().out

    with (folder / "sweep.csv").open() as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert sorted(rows) == JOBS
    for name, row in rows.items():
        report = json.loads((folder / name / "report.json").read_text())
        assert float(row["test_perplexity"]) == report["test"]["perplexity"]
        assert float(row["validation_perplexity"]) == report["final"]["perplexity"]
        period = "dense" if name == JOBS[0] else "sparse"
        [work] = [rank["work"][period] for rank in report["ranks"]]
        assert int(row["largest_state_bytes"]) == sum(work["state"].values())
        step = work["seconds"] / work["steps"]
        assert float(row[f"{period}_step_ms"]) == pytest.approx(1e3 * step)
    draw = json.loads((folder / TICKETS[0] / "report.json").read_text())["draw"]
    assert int(rows[TICKETS[0]]["draw_step"]) == draw["step"]

    capsys.readouterr()
    changed = [*SMALL, "pruning.ratio=0.5", "arm=dense", "model.learning_rate=0.1"]
    monkeypatch.setattr(sys, "argv", [*shlex.split(SWEEP), *changed])
    with pytest.raises(
        SystemExit, match=r"another job: there model\.learning_rate=0\.003, here 0\.1"
    ):
        entry.main()
    assert Job.read(folder / "dense-seed0").status == "finished"
