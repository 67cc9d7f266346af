from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from lightning_axosparse import Ticket
from lightning_axosparse.cli.job import (
    RESULT,
    Job,
    command,
    earlier_result,
    first_difference,
    jobs_in,
    random_ticket,
    recording_errors,
    settings_of,
)
from tests.cli.sweep.jobs import write_job


def configured(folder, **changed):
    parts = {"data": {"path": "${folder}/text"}, "model": {}, "trainer": {}, "callbacks": {}}
    pruning = {"ratio": 0.8, "callback": None}
    content = {"seed": 0, "folder": str(folder), **parts, "pruning": pruning}
    return OmegaConf.create({**content, **changed})


def test_a_folder_tells_how_its_job_ended(tmp_path):
    write_job(tmp_path / "a", "ticket", 0.8, seed=2)
    write_job(tmp_path / "b", "ticket", 0.9, error="No memory\n\nTraceback")
    write_job(tmp_path / "c", "dense", None, finished=False)
    jobs = jobs_in(tmp_path)
    assert [job.status for job in jobs] == ["finished", "failed", "not finished"]
    assert [job.problem for job in jobs] == ["", "No memory", ""]
    assert [(job.arm, job.ratio, job.seed) for job in jobs] == [
        ("ticket", 0.8, 2),
        ("ticket", 0.9, 0),
        ("dense", None, 0),
    ]


@pytest.mark.parametrize(
    ("callback", "arm", "ratio"),
    [(None, "dense", None), ({}, "dense", None), ({"_target_": "Some"}, "ticket", 0.5)],
)
def test_a_run_without_an_arm_is_a_ticket_if_it_prunes(callback, arm, ratio, tmp_path):
    write_job(tmp_path / "a", "", 0.7)
    config = {"seed": 0, "pruning": {"ratio": 0.5, "callback": callback}}
    OmegaConf.save(config, tmp_path / "a" / ".hydra" / "config.yaml")
    assert (Job.read(tmp_path / "a").arm, Job.read(tmp_path / "a").ratio) == (arm, ratio)


@pytest.mark.parametrize("wrong", ["x", [0.5], "${unknown}"])
def test_a_ratio_or_a_seed_that_is_no_number_is_none(wrong, tmp_path):
    write_job(tmp_path, "ticket", 0.8, error="Sorry")
    config = {"seed": wrong, "arm": {"name": "ticket", "ratio": wrong}}
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    assert (Job.read(tmp_path).ratio, Job.read(tmp_path).seed) == (None, None)


def test_jobs_stand_in_the_order_of_their_numbers(tmp_path):
    for name in ("10", "9", "ticket-0.5", "ticket-0.25"):
        write_job(tmp_path / name, "ticket", 0.8)
    names = [job.folder.name for job in jobs_in(tmp_path)]
    assert names == ["9", "10", "ticket-0.5", "ticket-0.25"]


def test_the_command_runs_a_job_alone_in_its_folder(tmp_path):
    write_job(tmp_path / "a b", "ticket", 0.8, overrides=("data.path='~/my books/*.txt'",))
    words = shlex.split(Job.read(tmp_path / "a b").command)
    assert words == [
        "axosparse-train",
        "arm=ticket",
        "pruning.ratio=0.8",
        "seed=0",
        "data.path='~/my books/*.txt'",
        f'hydra.run.dir="{tmp_path}/a b"',
    ]


def test_the_command_keeps_other_overrides_of_hydra(tmp_path):
    hydra = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=old", "hydra.verbose=true"]
    assert command(["-m"], ["seed=0,1"], hydra, "hydra.sweep.dir", tmp_path) == (
        f"axosparse-train -m seed=0,1 hydra.verbose=true hydra.sweep.dir={tmp_path}"
    )


def test_settings_do_not_depend_on_where_a_job_writes(tmp_path):
    assert settings_of(configured("here")) == settings_of(configured("there"))
    assert settings_of(configured("here"))["data"] == {"path": "./text"}
    unused = configured("here", pruning={"ratio": 0.5, "callback": None})
    assert settings_of(unused) == settings_of(configured("here"))


def test_a_result_of_other_settings_is_not_taken(tmp_path):
    assert earlier_result(configured(tmp_path)) is None
    settings = settings_of(configured(tmp_path))
    result = write_job(tmp_path / "a", "ticket", 0.8, settings=settings)
    (tmp_path / "a" / RESULT).rename(tmp_path / RESULT)
    assert earlier_result(configured(tmp_path)) == result
    with pytest.raises(ValueError, match=r"another job: there model\.width=None, here 8\. Choose"):
        earlier_result(configured(tmp_path, model={"width": 8}))


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}, None),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "there a.b=1, here 2"),
        ({"a": {"b": 1}}, {"a": None}, "there a={'b': 1}, here None"),
        ({"a": [1]}, {"a": [1], "c": 0}, "there c=None, here 0"),
    ],
)
def test_the_first_difference(before, now, found):
    assert first_difference(before, now) == found


def test_an_error_is_recorded_and_gone_after_the_next_attempt(tmp_path):
    (tmp_path / RESULT).write_text("old")
    with pytest.raises(RuntimeError), recording_errors(tmp_path):
        raise RuntimeError("no memory")
    assert not (tmp_path / RESULT).exists()
    assert (tmp_path / "error.txt").read_text().startswith("no memory\n\nTraceback")
    with recording_errors(tmp_path):
        pass
    assert not (tmp_path / "error.txt").exists()


def test_what_is_taken_from_the_job_of_a_ticket(tmp_path):
    write_job(tmp_path / "a", "ticket", 0.8, ticket=True)
    drawn = Ticket.load(tmp_path / "a" / "ticket.pt")
    random = random_ticket(str(tmp_path / "a"), 3)
    assert random.layer_sparsity() == drawn.layer_sparsity()
    assert random == drawn.random(3)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (None, "no job has run there. Run arm=ticket with the same"),
        ({"error": "Sorry\n\n..."}, "has failed: Sorry. Run it again with: axosparse-train arm="),
        ({"finished": False}, "has not finished. Run it again with: axosparse-train arm="),
        ({"draw_step": None}, r"that job drew none. Train it to the end .*pruning\.end"),
    ],
)
def test_what_is_missing_is_said(job, message, tmp_path):
    if job is not None:
        write_job(tmp_path / "a", "ticket", 0.8, **job)
    with pytest.raises(ValueError, match=message):
        random_ticket(str(tmp_path / "a"), 0)


def test_a_damaged_result_is_a_failure_that_is_named(tmp_path):
    write_job(tmp_path / "a", "ticket", 0.8)
    path = tmp_path / "a" / RESULT
    path.write_text(path.read_text().replace('"steps": ', '"steps": 1'))
    (job,) = jobs_in(tmp_path)
    assert (job.status, job.result) == ("failed", None)
    assert job.problem.startswith(f"'{path}' cannot be read: it is damaged")
