from __future__ import annotations

import json
import math
import sys
from copy import deepcopy
from dataclasses import asdict, replace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.perplexity import __main__ as command
from benchmarks.perplexity import plan
from benchmarks.perplexity.arms import Arm, once
from benchmarks.perplexity.job import Job
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.table import Comparison
from benchmarks.perplexity.tasks import Task
from benchmarks.perplexity.together import Together, run_all
from benchmarks.perplexity.training import Training
from benchmarks.perplexity.updates import own_factors
from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, GradualPruning
from lightning_axosparse.examples.data import EpochShuffle
from tests.quiet import QUIET

TINY = Task("TINY", "folder", 16, 2, 2, 8, batch_size=2, epochs=2, steps=16, held_out=4)
CHANGING = {"begin": 0.25, "end": 0.75, "every": 1 / 8}
GRADUAL = Arm(rate=1e-2, ratio=0.8, method="gradual", score="curvature", **CHANGING)
BEGIN, DRAW = 8, 24
"""Steps of :data:`TINY` before the first masks and before the draw."""


@pytest.fixture
def folder(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a.txt", "b.txt"):
        (texts / name).write_text(f"In file {name} stands a text of some length. " * 40)
    return texts


def trained(arm, folder, seed=0, steps=TINY.all_steps):
    training = Training(TINY, arm, seed, TINY.texts(folder))
    while training.step < steps:
        training.advance()
    return training


def weights_of(training):
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float64")
def test_jobs_that_train_together_train_as_each_alone(folder, tmp_path):
    arms = [
        Arm(),
        once(0.5),
        *(Arm(ratio=r, method="gradual", **CHANGING) for r in (0.8, 0.9)),
        replace(GRADUAL, final=0.0, shape="linear", rise=0.5, ramp=2.0, row_floor=2),
    ]
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
    for name in ("own_rates", "ham", "ham_decay", "averaged", "smoothed"):
        changed = Job(TINY, replace(GRADUAL, **{name: 0.5}), 0)
        with pytest.raises(ValueError, match=f"{name} 0.5 changes more"):
            Together([changed], folder, torch.device("cpu"))


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
        Arm(ratio=0.8, method="returning", ramp=1.0, **{**CHANGING, "every": 0.0}),
        replace(
            GRADUAL,
            final=0.0,
            shape="linear",
            rise=0.5,
            row_floor=2,
            own_rates=0.5,
            ham=1.0,
            averaged=0.9,
            smoothed=0.8,
        ),
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


def kept_at(step, ramp):
    """What is left of :data:`GRADUAL` with another ramp, if masks changed at every step."""
    progress = min(max((step - BEGIN) / (DRAW - BEGIN), 0), 1)
    return 1 - 0.8 * (1 - (1 - progress) ** ramp)


def test_rates_decay_by_shape_and_end_and_rise_as_less_is_kept(folder):
    def rates(arm, **changed):
        training = Training(TINY, replace(arm, **changed), 0, TINY.texts(folder))
        return [training.rate(step) for step in range(TINY.all_steps)]

    dense, warm = Arm(rate=1e-2), round(TINY.model(1e-2).warmup * TINY.all_steps)
    usual, flat, tenth = rates(dense), rates(dense, final=1.0), rates(dense, shape="linear")
    line = rates(dense, final=0.0, shape="linear")
    rising = rates(GRADUAL, ramp=5.0, rise=0.25)
    assert usual[:warm] == line[:warm]
    assert rates(dense, rise=0.25) == usual
    for step in range(TINY.all_steps):
        done = (step - warm) / (TINY.all_steps - warm)
        if step >= warm:
            assert usual[step] == 1e-2 * (0.55 + 0.45 * math.cos(math.pi * done))
            assert flat[step] == 1e-2
            assert tenth[step] == pytest.approx(1e-2 * (1 - 0.9 * done))
            assert line[step] == pytest.approx(1e-2 * (1 - done))
        assert rising[step] == pytest.approx(usual[step] * kept_at(step, 5) ** -0.25)


def test_the_ramp_says_how_much_is_pruned_when(folder):
    training = Training(TINY, replace(GRADUAL, ramp=5.0), 0, TINY.texts(folder))
    found = {}
    while training.step < TINY.all_steps:
        training.advance()
        if training.pruner.masks:
            kept = torch.cat([mask.flatten() for mask in training.pruner.masks.values()])
            found[training.step - 1] = float(kept.double().mean())
    assert min(found) == BEGIN
    for step, kept in found.items():
        assert kept == pytest.approx(kept_at(step // 4 * 4, 5), abs=1e-4)  # every 4 steps


def test_a_floor_of_rows_keeps_as_many_entries_elsewhere(folder):
    def kept_by_row(arm):
        masks = trained(arm, folder).pruner.masks
        return torch.cat([mask.sum(1) for mask in masks.values()])

    free, floored = kept_by_row(GRADUAL), kept_by_row(replace(GRADUAL, row_floor=3))
    assert int(free.min()) < 3 <= int(floored.min())
    assert free.sum() == floored.sum()
    assert floored.max() > 3


@pytest.mark.parametrize(("row_floor", "density"), [(0, 0.2), (2, 0.2), (5, 0.31)])
def test_pruned_entries_return_if_they_are_the_largest(folder, row_floor, density):
    arm = replace(GRADUAL, method="returning", row_floor=row_floor)
    training, name = Training(TINY, arm, 0, TINY.texts(folder)), "model.1.mlp.0.weight"
    weight, changes = training.model.get_parameter(name), []
    masks = returning = None
    while training.step < TINY.all_steps:
        training.advance()
        if training.pruner.masks is not masks:
            changes.append(training.step)
            masks = training.pruner.masks
            assert torch.equal(weight != 0, masks[name])
            assert returning is None or masks[name][returning]
            returning = tuple((weight == 0).nonzero()[0].tolist())
        elif returning is not None and training.step < DRAW:
            assert weight[returning] != 0, "it trains on"
            weight.data[returning] = 1.0
    assert changes == [9, 13, 17, 21, 25]
    assert round(float(masks[name].float().mean()), 2) == density


def test_blocks_of_rows_are_pruned_as_a_whole(folder):
    masks = trained(replace(GRADUAL, block=4), folder).pruner.masks
    blocks = [mask.view(-1, 4, mask.shape[-1]) for mask in masks.values()]
    split = sum(int((block.any(1) != block.all(1)).sum()) for block in blocks)
    assert split <= len(blocks), "at most the one at each weight's threshold"
    assert sum(int(mask.sum()) for mask in masks.values()) > 0


def test_own_rates_are_those_of_a_group_for_each_weight(folder):
    kept = {"thin": 1, "middle": 20, "mean": 26, "thick": 100, "none": 0, "other": 9}
    masks = {name: torch.arange(100) < number for name, number in kept.items()}  # in all 0.26
    wanted = {"thin": 3.0, "middle": 1.3**0.5, "mean": 1.0, "thick": 0.26**0.5, "none": 3.0}
    assert own_factors(masks, 0.5) == pytest.approx({**wanted, "other": (26 / 9) ** 0.5})
    assert own_factors(masks, 1.0)["thick"] == 0.5
    training = trained(replace(GRADUAL, own_rates=0.5), folder, steps=DRAW + 2)
    factors = own_factors(training.pruner.masks, 0.5)
    assert min(factors.values()) < 0.95
    assert max(factors.values()) > 1.05
    other = deepcopy(training)
    step = other.step
    other._loss(*other._batch(step)).backward()
    other.pruner.on_gradients(step)
    torch.nn.utils.clip_grad_norm_(other.model.parameters(), TINY.clip)
    for name, weight in other.model.named_parameters():
        decay = 0.1 if weight.dim() > 1 else 0.0
        rate = training.rate(step) * factors.get(name, 1.0)
        alone = torch.optim.AdamW([weight], lr=rate, betas=(0.9, 0.95), weight_decay=decay)
        alone.state[weight] = other.optimizer.state[weight]
        alone.step()
    training.advance()
    for name, weight in other.model.named_parameters():
        torch.testing.assert_close(training.model.get_parameter(name), weight.detach())
    for name, mask in training.pruner.masks.items():
        assert not training.model.get_parameter(name)[~mask].any()


def test_ham_multiplies_matrices_after_each_step(folder):
    a, b = 2.0, 0.3
    training = trained(replace(GRADUAL, ham=a, ham_decay=b), folder, steps=DRAW + 2)
    other = deepcopy(training)
    plain = Training(TINY, GRADUAL, 0, TINY.texts(folder))
    plain.load_state_dict(other.state_dict())
    plain.advance()
    training.advance()
    rate, steps = plain.rate(DRAW + 2), DRAW + 3
    for name, weight in plain.model.named_parameters():
        state = plain.optimizer.state[weight]
        mean = state["exp_avg"] / (1 - 0.9**steps)
        root = (state["exp_avg_sq"] / (1 - 0.95**steps)).sqrt() + 1e-8
        wanted = weight.detach().clone()
        if weight.dim() > 1:
            wanted *= torch.exp(-rate * (a * wanted.sign() * mean / root + b))
            assert not torch.equal(wanted, weight)
        torch.testing.assert_close(training.model.get_parameter(name).detach(), wanted)
    for name, mask in training.pruner.masks.items():
        assert not training.model.get_parameter(name)[~mask].any()


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(replace(GRADUAL, averaged=0.9), id="pruned"),
        pytest.param(Arm(rate=1e-2, averaged=0.9, begin=0.75, end=0.75), id="dense"),
    ],
)
def test_the_averages_from_the_draw_on_are_the_network_in_the_end(folder, arm):
    plain = Training(TINY, replace(arm, averaged=0.0), 0, TINY.texts(folder))
    average = {}
    while plain.step < TINY.all_steps:
        plain.advance()
        if plain.step > DRAW:
            new = weights_of(plain)
            average = {n: 0.9 * average.get(n, w) + 0.1 * w for n, w in new.items()}
    found = trained(arm, folder)
    for name, weight in found.model.named_parameters():
        torch.testing.assert_close(weight.detach(), average[name], rtol=1e-5, atol=1e-6)
        last = plain.model.get_parameter(name)
        assert torch.equal(weight == 0, last == 0)
        assert not torch.allclose(weight, last, rtol=1e-4, atol=1e-5)
    assert found.perplexity(found.texts.test) != plain.perplexity(plain.texts.test)


def test_averages_of_the_weights_are_scored(folder):
    arm = replace(GRADUAL, floor=0.0)
    training = trained(replace(arm, smoothed=0.8), folder, steps=BEGIN)
    average = {}
    while training.step <= DRAW:
        before, held = weights_of(training), training.pruner.masks
        moments = {
            name: training.optimizer.state[weight]["exp_avg_sq"].clone()
            for name, weight in training.model.named_parameters()
        }
        training.advance()
        masks = training.pruner.masks
        if masks is not held:
            scores = {
                name: average.get(name, before[name]).abs() * moments[name].sqrt().sqrt()
                for name in masks
            }
            kept = torch.cat([scores[name][mask] for name, mask in masks.items()])
            pruned = torch.cat([scores[name][~mask] for name, mask in masks.items()])
            assert not len(pruned) or pruned.max() <= kept.min()
            average = {n: a * masks[n] if n in masks else a for n, a in average.items()}
        for name, weight in weights_of(training).items():
            average[name] = 0.8 * average.get(name, weight) + 0.2 * weight
    usual = trained(arm, folder).pruner.masks
    assert any(not torch.equal(mask, usual[name]) for name, mask in training.pruner.masks.items())


def test_runs_share_no_beginning_that_differs(folder, tmp_path):
    line = replace(GRADUAL, final=0.0, shape="linear")
    ham = replace(GRADUAL, ham=10.0)
    wanted = {Job(TINY, arm, 0): trained(arm, folder) for arm in (line, ham)}
    results = Results(tmp_path / "results.jsonl")
    dense = Job(TINY, Arm(rate=GRADUAL.rate), 0)
    results.complete([dense, *wanted], tmp_path / "states", folder)
    for job, alone in wanted.items():
        assert results.lines()[job]["test"] == round(alone.perplexity(alone.texts.test), 4)
    for own in ({"own_rates": 0.5}, {"rise": 0.5}, {"ramp": 5.0}, {"smoothed": 0.9}):
        assert replace(line, **own).beginning == Arm(rate=1e-2, final=0.0, shape="linear")


def test_defaults_are_those_of_the_lines_that_lack_a_field(tmp_path):
    old = asdict(plan.CURVED)
    added = {
        "final": 0.1,
        "shape": "cosine",
        "rise": 0.0,
        "ramp": 3.0,
        "block": 1,
        "row_floor": 0,
        "own_rates": 0.0,
        "ham": 0.0,
        "ham_decay": 0.0,
        "averaged": 0.0,
        "smoothed": 0.0,
    }
    line = {"task": asdict(TINY), "arm": {k: old[k] for k in old.keys() - added}, "seed": 3}
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert list(Results(path).lines()) == [Job(TINY, replace(plan.CURVED, **added), 3)]


def test_only_the_jobs_of_some_seeds_are_run(monkeypatch, tmp_path):
    run = []
    monkeypatch.setattr(Results, "complete", lambda self, jobs, *_: run.extend(jobs))
    words = ["perplexity", "rates-to-zero", "ramps", "--seeds", "1", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--results", str(tmp_path / "results.jsonl")])
    command.main()
    every = [*plan.jobs("rates-to-zero"), *plan.jobs("ramps")]
    assert run == [job for job in every if job.seed != 0]
    assert {job.seed for job in run} == {1, 2}
