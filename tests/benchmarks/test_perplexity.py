from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from benchmarks.perplexity import plan
from benchmarks.perplexity.arms import Dense, Pruned
from benchmarks.perplexity.job import Job
from benchmarks.perplexity.plots import plot_settling
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.searching import WINDOW, measure
from benchmarks.perplexity.settling import Settling
from benchmarks.perplexity.table import Spread, against, compare, label, settled
from benchmarks.perplexity.tasks import MAIN, TASKS, Task, split_by_file
from lightning_axosparse import EarlyBirdTicket
from lightning_axosparse.cli.train import configuration

TINY = Task("TINY", "english", 16, 2, 2, 8, batch_size=2, epochs=2, steps=4, held_out=4)


@pytest.fixture
def english(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"In file {name} stands a text of some length. " * 40)
    return folder


def test_finished_jobs_are_not_run_again(english, tmp_path):
    results = Results(tmp_path / "results.jsonl")
    ticket = Job(TINY, Pruned(draw_by=0.25), 0)
    random = replace(ticket, arm=replace(ticket.arm, masks="random"))
    with pytest.raises(ValueError, match="run its job first"):
        results.complete([random], english)
    results.complete([ticket, Job(TINY, Dense(2.0), 0)], english)
    before = results.path.read_text()
    assert len(before.splitlines()) == 2

    initial = replace(ticket, arm=replace(ticket.arm, masks="initial"))
    shuffled = replace(ticket, arm=replace(ticket.arm, entries="random"))
    settling = Job(TINY, Settling(ratios=(0.5,), intervals=(8,), window=2), 0)
    results.complete([ticket, shuffled, random, initial, settling], english)
    assert results.path.read_text().startswith(before)
    lines = results.lines()
    kinds = [line["arm"].get("masks", line["arm"]["kind"]) for line in lines]
    assert kinds == ["ticket", "dense", "ticket", "random", "initial", "settling"]
    assert len({line["test"] for line in lines[:-1]}) == 5  # five arms are five trainings
    for line in lines:
        assert 1 < line["validation"] < 1000
        assert 1 < line["test"] < 1000
        assert line["seconds"] > 0
    drawn, dense, shuffled, chance, first, settled = lines
    steps = [line["draw_step"] for line in (drawn, shuffled, chance, first)]
    assert steps == [2, 2, None, None]
    assert shuffled["densities"] == drawn["densities"]
    assert chance["densities"] == drawn["densities"] != first["densities"]
    assert all(
        ours < 0.5 * theirs
        for ours, theirs in zip(drawn["stage_bytes"], dense["stage_bytes"], strict=True)
    )
    assert list(settled["distances"]) == ["0.5/8"]
    assert len(settled["distances"]["0.5/8"]) == 7


def test_an_interrupted_run_leaves_whole_lines(english, tmp_path, monkeypatch):
    results = Results(tmp_path / "results.jsonl")
    jobs = [Job(TINY, Dense(), 0), Job(TINY, Dense(3.0), 0)]
    run = Job.run

    def stopped(job, *args):
        if job == jobs[1]:
            raise KeyboardInterrupt
        return run(job, *args)

    monkeypatch.setattr(Job, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        results.complete(jobs, english)
    assert [json.loads(x)["seed"] for x in results.path.read_text().splitlines()] == [0]
    monkeypatch.setattr(Job, "run", run)
    results.complete(jobs, english)
    assert [results.of(job) is not None for job in jobs] == [True, True]


def test_arms_are_compared_seed_by_seed(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    numbers = {
        Dense(): {3: 10.0, 4: 20.0},
        Dense(2.0): {3: 8.0, 4: 16.0},
        Pruned(): {3: 11.0, 4: 20.0, 5: 99.0},
    }
    for arm, tests in numbers.items():
        for seed, test in tests.items():
            measured = {"validation": test + 1, "test": test, "stage_bytes": [2e6, 1e6]}
            drawn = {"draw_step": 128 + seed} if isinstance(arm, Pruned) else {}
            results.add(Job(TINY, arm, seed), {**measured, **drawn})
    rows = compare(results, TINY, numbers, (3, 4, 5), "test")
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]
    stages = "2.0 / 1.0 MB"
    dense, control, ticket = cells
    assert dense[2:] == ["16.00 ± 7.07", "15.00 ± 7.07", "+0.0 ± 0.0 %", "", "", stages]
    assert control[2:] == ["13.00 ± 5.66", "12.00 ± 5.66", "-20.0 ± 0.0 %", "", "", stages]
    # 10 and 0 % above dense, 37.5 and 25 % above its control; seed 5 has neither.
    assert ticket[:4] == ["ticket", "3 4 5", "44.33 ± 48.42", "43.33 ± 48.42"]
    assert ticket[4:] == ["+5.0 ± 7.1 %", "+31.2 ± 8.8 %", "131, 132, 133", stages]


def test_masks_have_settled_where_the_first_distance_is_below_the_threshold(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    job = Job(TINY, Settling(ratios=(0.5, 0.8), intervals=(8,), window=3), 0)
    never = replace(job, seed=1)
    distances = {"0.5/8": [0.9, 0.7, 0.4, 0.6, 0.3, 0.2], "0.8/8": [0.9] * 6}
    results.add(job, {"distances": distances})
    rows = settled(results, [job, never])
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]
    # The first distance comes with the third of eight masks.
    assert cells == [
        ["0.003", "50%", "8 times", "62%", "0.20"],
        ["0.003", "80%", "8 times", "never", "0.90"],
    ]
    plot_settling(results, [job, never], tmp_path / "settling.png")
    assert (tmp_path / "settling.png").read_bytes().startswith(b"\x89PNG")


def test_searching_takes_a_bit_a_weight_and_mask():
    found = {score: measure(64, 2, score) for score in ("magnitude", "saliency")}
    for sizes in found.values():
        assert sizes["window"] == WINDOW * sizes["entries"] // 8
        assert sizes["peak"] >= 0


def test_spreads_and_labels():
    assert Spread.of([1.0, 3.0]) == Spread(2.0, 2**0.5)
    assert Spread.of([2.0]).shown("+.1f") == "+2.0"
    assert against({0: {"test": 1.0}}, {1: {"test": 1.0}}, "test") is None
    assert label(Pruned(ratio=0.9, masks="random")) == "random, ratio 0.9"


def test_the_ticket_and_the_main_job_are_those_of_the_package():
    signature = inspect.signature(EarlyBirdTicket.__init__).parameters
    for name in ("floor", "every", "threshold", "draw_after", "draw_by"):
        assert getattr(plan.TICKET, name) == signature[name].default
    with initialize_config_dir(str(configuration()), version_base="1.3"):
        config = compose("config")
    for name in ("ratio", "floor", "every", "threshold", "draw_after", "draw_by"):
        assert getattr(plan.SAME_RATE, name) == config.pruning[name]
    assert plan.SAME_RATE.entries == config.pruning.entries
    assert plan.SAME_RATE.factor == config.pruning.learning_rate_factor
    data = config.data
    assert (MAIN.context, MAIN.batch_size, MAIN.held_out) == (
        data.context,
        data.batch_size,
        data.max_held_out,
    )
    assert (MAIN.epochs, MAIN.steps) == (
        config.trainer.max_epochs,
        config.trainer.limit_train_batches,
    )
    assert MAIN.clip == config.trainer.gradient_clip_val
    assert MAIN.model().hparams == instantiate(config.model).hparams


def test_files_are_either_trained_on_or_held_out(tmp_path):
    files = [tmp_path / f"{place:02}" for place in range(40)]
    for place, file in enumerate(files):
        file.write_bytes(bytes([place]))
    train, validation, test = (text.tolist() for text in split_by_file(files))
    assert sorted(train + validation + test) == list(range(40))
    assert (validation, test) == ([0, 20], [10, 30])


def test_tables_have_the_arms_that_others_are_compared_with():
    for phase, comparisons in plan.PHASES.items():
        assert {job.task.name for job in plan.jobs(phase)} <= set(TASKS)
        for each in comparisons:
            assert plan.CONTROL in each.arms
            assert set(each.seeds) <= set(plan.FRESH if each.key == "test" else plan.CHOOSING)
