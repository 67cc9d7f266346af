from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lightning_axosparse.callbacks.report.result import RunResult


def test_the_final_numbers_of_a_run(facts):
    result = RunResult.of(facts, {"seed": 3})
    assert (result.stages, result.replicas, result.steps) == (2, 2, 2)
    assert result.train_loss == 3.0
    assert (result.dense_validation_loss, result.validation_loss, result.test_loss) == (2, 1, 1.5)
    assert result.test_perplexity == pytest.approx(math.exp(1.5))
    assert (result.draw_step, result.density) == (1, 0.2)
    assert result.densities == pytest.approx({"model.0.weight": 0.25, "model.1.weight": 0.15})
    assert result.state_bytes == {"dense": [32_000_000] * 4, "sparse": [32_000_000] * 4}
    assert result.reduced_bytes == {"dense": [4_000_000] * 4, "sparse": [2_000_000] * 4}
    assert result.step_seconds == {"dense": [0.2] * 4, "sparse": [0.1] * 4}
    assert result.period == "sparse"


def test_a_dense_run_keeps_all(facts):
    for rank in facts.ranks:
        del rank.work["sparse"]
    result = RunResult.of(replace(facts, draw=None, test_loss=None), {})
    assert (result.period, result.density, result.densities) == ("dense", 1.0, {})
    assert (result.draw_step, result.test_perplexity) == (None, None)


@pytest.mark.parametrize("loss", [1.5, math.inf, None])
def test_a_file_has_one_line_and_gives_the_numbers_back(loss, facts, tmp_path):
    path = tmp_path / "result.jsonl"
    result = RunResult.of(replace(facts, test_loss=loss), {"model": {"width": 8}})
    result.save(path)
    assert path.read_text().count("\n") == 1
    assert json.loads(path.read_text())["validation_perplexity"] == pytest.approx(math.e)
    assert RunResult.load(path) == result
