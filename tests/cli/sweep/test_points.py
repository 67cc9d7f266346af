from __future__ import annotations

import math

import pytest

from lightning_axosparse.cli.job import jobs_in
from lightning_axosparse.cli.sweep import CURVES, TEST, points, varying
from tests.cli.sweep.jobs import write_job


@pytest.fixture
def jobs(tmp_path):
    for seed in (0, 1):
        write_job(tmp_path / f"dense-{seed}", "dense", None, seed, test_loss=1.0 + seed)
        for ratio in (0.5, 0.8):
            write_job(
                tmp_path / f"ticket-{ratio}-{seed}", "ticket", ratio, seed, test_loss=1 + ratio
            )
    write_job(tmp_path / "small", "small", 0.8, 0, test_loss=9.0)
    write_job(tmp_path / "failed", "ticket", 0.8, 2, error="Sorry")
    return jobs_in(tmp_path)


def test_a_point_has_the_finished_jobs_of_an_arm_at_a_ratio(jobs):
    found = {(point.label, point.ratio): point for point in points(jobs)}
    assert list(found) == [("dense", None), ("small", 0.8), ("ticket", 0.5), ("ticket", 0.8)]
    assert [job.seed for job in found["ticket", 0.8].jobs] == [0, 1]
    assert found["ticket", 0.8].values(TEST) == pytest.approx([math.exp(1.8)] * 2)
    assert found["ticket", 0.8].values(CURVES["memory"]) == [32.0, 32.0]
    assert found["ticket", 0.8].values(CURVES["step_time"]) == pytest.approx([100.0, 100.0])


def test_a_comparison_is_between_runs_of_the_same_seed(jobs):
    dense, small, half, most = points(jobs)
    expected = (math.exp(1.5 - 1) + math.exp(1.5 - 2)) / 2 - 1
    assert half.against(dense, TEST) == pytest.approx(expected)
    assert small.against(dense, TEST) == pytest.approx(math.exp(8) - 1)
    assert most.against(None, TEST) is None


def test_other_overrides_that_vary_make_curves_of_their_own(tmp_path):
    for width in (8, 16):
        others = (f"model.width={width}", "model.depth=2")
        write_job(tmp_path / f"{width}", "ticket", 0.8, overrides=others)
    jobs = jobs_in(tmp_path)
    assert varying(jobs) == ["model.width"]
    labels = [point.label for point in points(jobs)]
    assert labels == ["ticket, model.width=16", "ticket, model.width=8"]
