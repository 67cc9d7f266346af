from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lightning_axosparse import CorruptFileError
from lightning_axosparse.callbacks.report.facts import RunResult
from tests.callbacks.report.runs import make_work


def test_a_step_divides_into_its_whole_time():
    seconds = make_work(1).seconds_per_step()
    assert sum(seconds.values()) == pytest.approx(0.2)
    assert seconds == pytest.approx(
        {
            "compute": 0.12,
            "waiting": 0.02,
            "all-reduce": 0.0,
            "optimizer": 0.01,
            "densify, compress": 0.01,
            "other": 0.04,
        }
    )


def test_loss_is_the_mean_over_replicas(facts):
    assert facts.losses == [4.0, 3.0]


def test_replicas_may_skip_different_batches(facts):
    skipping = {0: [5.0, None, 1.0, None], 1: [3.0, 2.0, None, None]}
    for rank in facts.ranks:
        rank.losses = skipping[rank.replica]
    assert facts.losses == [4.0, 2.0, 1.0, None]
    assert RunResult.of(facts, {}).train_loss == 1.0


def test_json_has_accuracies_of_a_model_that_classifies(facts, tmp_path):
    facts.validations = [replace(v, accuracy=0.75) for v in facts.validations]
    facts.test_accuracy = 0.5
    facts.draw = replace(facts.draw, channels={"model.1": (8, 3)})
    facts.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["final"] == {"loss": 1.0, "accuracy": 0.75}
    assert content["test"] == {"loss": 1.5, "accuracy": 0.5}
    assert content["draw"]["channels"] == {"model.1": [8, 3]}


def test_json_has_losses_alone_of_other_data_than_text(facts, tmp_path):
    facts.ranks[0].tokens, facts.test_loss = 0, 0.0
    facts.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    found = [content[name] for name in ("dense_at_draw", "final", "test")]
    assert found == [{"loss": 2.0}, {"loss": 1.0}, {"loss": 0.0}]


def test_json_holds_what_follows_from_the_facts(facts, tmp_path):
    facts.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["dense_at_draw"]["perplexity"] == pytest.approx(math.e**2)
    assert content["final"]["bits_per_byte"] == pytest.approx(1 / math.log(2))
    assert content["test"]["loss"] == 1.5
    assert content["losses"] == [4.0, 3.0]
    assert content["draw"]["sparsity"] == {"model.0.weight": 0.75, "model.1.weight": 0.85}
    sparse = content["ranks"][1]["work"]["sparse"]
    assert sparse["seconds_per_step"]["compute"] == pytest.approx(0.06)
    assert sparse["state"]["optimizer"] == 16_000_000


def test_the_final_numbers_of_a_run(facts):
    result = RunResult.of(facts, {"seed": 3})
    assert (result.stages, result.replicas, result.steps) == (2, 2, 2)
    assert result.train_loss == 3.0
    assert (result.dense_validation_loss, result.validation_loss, result.test_loss) == (2, 1, 1.5)
    assert result.test_perplexity == pytest.approx(math.exp(1.5))
    assert (result.draw_step, result.density) == (1, 0.2)
    assert result.state_bytes == {"dense": [32_000_000] * 4, "sparse": [32_000_000] * 4}
    assert result.reduced_bytes == {"dense": [4_000_000] * 4, "sparse": [2_000_000] * 4}
    assert result.step_seconds == {"dense": [0.2] * 4, "sparse": [0.1] * 4}
    assert result.period == "sparse"


def test_a_dense_run_keeps_all(facts):
    for rank in facts.ranks:
        del rank.work["sparse"]
    result = RunResult.of(replace(facts, draw=None, test_loss=None), {})
    assert (result.period, result.density) == ("dense", 1.0)
    assert (result.draw_step, result.test_perplexity) == (None, None)


def test_a_run_without_a_training_batch(facts):
    for rank in facts.ranks:
        rank.work.clear()
        rank.losses = []
    result = RunResult.of(replace(facts, draw=None, steps=[]), {})
    assert (result.steps, result.train_loss, result.period) == (0, None, "dense")
    assert (result.largest_state_bytes, result.largest_reduced_bytes) == (None, None)
    assert result.step_milliseconds("dense") is None


@pytest.mark.parametrize("loss", [1.5, math.inf, None])
def test_a_file_has_one_line_and_gives_the_numbers_back(loss, facts, tmp_path):
    path = tmp_path / "result.jsonl"
    result = RunResult.of(replace(facts, test_loss=loss), {"model": {"width": 8}})
    result.save(path)
    assert path.read_text().count("\n") == 1
    assert json.loads(path.read_text())["validation_perplexity"] == pytest.approx(math.e)
    assert RunResult.load(path) == result


def test_a_damaged_result_is_no_result(facts, tmp_path):
    path = tmp_path / "result.jsonl"
    result = RunResult.of(facts, {"model": {"width": 8}})
    result.save(path)
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        for bit in (0, 2, 5):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                assert RunResult.load(path) == result
            except CorruptFileError:
                refused += 1
    assert refused > 2.9 * len(whole)
    path.write_text("{}")
    with pytest.raises(CorruptFileError, match=r"result.jsonl. cannot be read.*crc32"):
        RunResult.load(path)
