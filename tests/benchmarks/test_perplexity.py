from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.perplexity import plan
from benchmarks.perplexity.arms import Arm, once
from benchmarks.perplexity.job import Job
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.table import Comparison
from benchmarks.perplexity.tasks import Task
from benchmarks.perplexity.together import Together, run_all
from benchmarks.perplexity.training import Training
from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, GradualPruning
from lightning_axosparse.examples.data import EpochShuffle
from tests.quiet import QUIET

TINY = Task("TINY", "folder", 16, 2, 2, 8, batch_size=2, epochs=2, steps=16, held_out=4)
CHANGING = {"begin": 0.25, "end": 0.75, "every": 1 / 8}


@pytest.fixture
def folder(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a.txt", "b.txt"):
        (texts / name).write_text(f"In file {name} stands a text of some length. " * 40)
    return texts


def trained(arm, folder, seed=0):
    training = Training(TINY, arm, seed, TINY.texts(folder))
    while training.step < TINY.all_steps:
        training.advance()
    return training


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float64")
def test_jobs_that_train_together_train_as_each_alone(folder, tmp_path):
    arms = [Arm(), once(0.5), *(Arm(ratio=r, method="gradual", **CHANGING) for r in (0.8, 0.9))]
    jobs = [Job(TINY, arm, seed) for seed, arm in enumerate(arms)]
    together = Together(jobs, folder, torch.device("cpu"))
    together.train()
    for job, run in zip(jobs, together.runs, strict=True):
        alone = trained(job.arm, folder, job.seed)
        for name, weight in alone.model.named_parameters():
            torch.testing.assert_close(run.model.get_parameter(name), weight, rtol=0, atol=1e-9)
        assert run.pruner.masks is None or all(
            torch.equal(mask, run.pruner.masks[name]) for name, mask in alone.pruner.masks.items()
        )
    results = Results(tmp_path / "together.jsonl")
    run_all(jobs, results, folder)
    lines = results.lines()
    assert lines.keys() == set(jobs)
    for job in jobs:
        alone = trained(job.arm, folder, job.seed)
        assert lines[job]["test"] == round(alone.perplexity(alone.texts.test), 4)
        assert (job.arm.ratio == 0) == (lines[job]["densities"] == {})
    with pytest.raises(ValueError, match="run it by itself"):
        Together([Job(TINY, Arm(dropout=0.1), 0)], folder, torch.device("cpu"))


@pytest.mark.parametrize(
    ("arm", "method"),
    [
        pytest.param(Arm(), None, id="dense"),
        pytest.param(once(0.8, score="curvature"), "early-bird", id="once"),
        pytest.param(
            Arm(ratio=0.8, method="gradual", score="curvature", **CHANGING), "gradual", id="gradual"
        ),
    ],
)
def test_a_job_trains_as_the_callback_does(folder, arm, method):
    ours = trained(arm, folder)
    L.seed_everything(0, verbose=False)
    texts, model = TINY.texts(folder), TINY.model(arm.rate)
    loader = DataLoader(
        texts.train, TINY.batch_size, sampler=EpochShuffle(len(texts.train), 0), drop_last=True
    )
    callbacks = []
    if method is not None:
        callbacks.append(
            GradualPruning(arm.ratio, arm.begin, arm.end, arm.every)
            if method == "gradual"
            else EarlyBirdTicket(arm.ratio, draw_by=arm.end, threshold=1e-9)
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=TINY.epochs,
        limit_train_batches=TINY.steps,
        gradient_clip_val=TINY.clip,
        **QUIET,
        strategy=AxoSparseStrategy(g_inter=1, microbatches=1),
        callbacks=callbacks,
    )
    trainer.fit(model, loader)
    for name, weight in model.named_parameters():
        mine = ours.model.get_parameter(name)
        assert torch.equal(weight == 0, mine == 0), name
        if name.endswith("qkv.bias"):
            # Those of keys have no gradient but what rounding leaves, which AdamW makes large.
            mine, weight = (each.view(3, -1)[::2] for each in (mine, weight))
        torch.testing.assert_close(mine, weight, rtol=1e-4, atol=1e-5)
    if arm.ratio:
        ticket = callbacks[0].ticket.masks
        assert all(torch.equal(ticket[n], mask) for n, mask in ours.pruner.masks.items())


@pytest.mark.parametrize(
    "arm",
    [
        Arm(dropout=0.1),
        once(0.8, factor=2.0, rewarm=0.1, decay=0.0, distill=0.5),
        Arm(ratio=0.8, method="through", factor=1.5, **CHANGING),
        Arm(ratio=0.8, method="gradual", drop=0.3, **CHANGING),
        Arm(ratio=0.8, method="rigl", drop=0.3, **CHANGING),
        Arm(ratio=0.8, method="set", drop=0.3, **CHANGING),
    ],
)
def test_a_run_that_was_stopped_goes_on(folder, arm, tmp_path):
    whole = trained(arm, folder)
    for stop in (6, 16, 30):
        first = Training(TINY, arm, 0, TINY.texts(folder))
        while first.step < stop:
            first.advance()
        torch.save(first.state_dict(), tmp_path / "state.pt")
        torch.manual_seed(7)
        second = Training(TINY, arm, 0, TINY.texts(folder))
        second.load_state_dict(torch.load(tmp_path / "state.pt"))
        while second.step < TINY.all_steps:
            second.advance()
        for name, weight in whole.model.named_parameters():
            assert torch.equal(weight, second.model.get_parameter(name)), (name, stop)


def test_finished_jobs_are_not_run_again(folder, tmp_path):
    results, states = Results(tmp_path / "results.jsonl"), tmp_path / "states"
    ticket = Job(TINY, once(0.8), 0)
    results.complete([ticket, Job(TINY, Arm(factor=2.0), 0)], states, folder)
    before = results.path.read_text()
    assert len(before.splitlines()) == 2
    results.complete([ticket, Job(TINY, Arm(), 0)], states, folder)
    after = results.path.read_text()
    assert after.startswith(before)
    found, dense = results.lines()[ticket], results.lines()[Job(TINY, Arm(), 0)]
    assert len(after.splitlines()) == 3
    assert 1 < found["test"] < 1000
    assert found["test"] != dense["test"]
    assert found["state_bytes"] < 0.5 * dense["state_bytes"]
    assert found["tokens_a_parameter"] == round(
        512 / sum(p.numel() for p in TINY.model(1e-3).parameters()), 2
    )
    kept = {name: round(density, 2) for name, density in found["densities"].items()}
    assert min(kept.values()) >= 0.01
    assert len(dense["distances"]) == 28


def test_an_interrupted_job_leaves_its_state_and_whole_lines(folder, tmp_path, monkeypatch):
    results, states = Results(tmp_path / "results.jsonl"), tmp_path / "states"
    jobs = [Job(TINY, Arm(), 0), Job(TINY, once(0.8, factor=3.0), 0)]
    advance = Training.advance

    def stopped(training):
        if training.arm.ratio and training.step == 20:
            raise KeyboardInterrupt
        advance(training)

    monkeypatch.setattr(Training, "advance", stopped)
    with pytest.raises(KeyboardInterrupt):
        results.complete(jobs, states, folder)
    assert [json.loads(x)["seed"] for x in results.path.read_text().splitlines()] == [0]
    steps = []
    monkeypatch.setattr(Training, "advance", lambda t: (steps.append(t.step), advance(t)))
    results.complete(jobs, states, folder)
    assert steps == list(range(20, 32))
    assert set(results.lines()) == set(jobs)


def test_arms_are_compared_seed_by_seed():
    first, second = (TINY, Arm()), (TINY, once(0.8))
    comparison = Comparison("Two arms", (first, second), (3, 4, 5), "test")
    numbers = {first: {3: 10.0, 4: 20.0}, second: {3: 11.0, 4: 20.0, 5: 99.0}}
    results = {
        Job(*arm, seed): {
            "validation": test + 1,
            "test": test,
            "tokens_a_parameter": 20.2,
            "state_bytes": 2e6,
            "seconds": 180,
        }
        for arm, tests in numbers.items()
        for seed, test in tests.items()
    }
    rows = comparison.rows(results)
    dense, ticket = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:])
    same = ["2.00 MB", "180"]
    assert dense[2:] == ["3 4", "20.2", "16.000 ± 7.071", "15.000 ± 7.071", "", *same]
    # 10 and 0 %; of seed 5 there is no dense run.
    assert ticket[:3] == ["TINY", "80% once, 0.003, from 0.25", "3 4 5"]
    assert ticket[5:] == ["43.333 ± 48.418", "+5.0 ± 7.1 %", *same]


def test_what_reports_is_not_what_chooses():
    assert not set(plan.CHOOSING) & set(plan.FRESH)
    for phase, comparisons in plan.PHASES.items():
        for each in comparisons:
            assert set(each.seeds) <= set(plan.FRESH if each.key == "test" else plan.CHOOSING)
            assert {job.task for job in plan.jobs(phase)} >= {job.task for job in each.jobs}
