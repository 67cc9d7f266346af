from __future__ import annotations

import csv
import re

import pytest
from omegaconf import OmegaConf

from lightning_axosparse.cli.job import Job
from lightning_axosparse.cli.sweep import (
    GatherResults,
    Point,
    gather,
    main,
    resume_command,
    summary,
)
from lightning_axosparse.cli.sweep import _dense_beside as dense_beside
from tests.cli.sweep.jobs import write_job

PICTURES = ["all_reduce.png", "draw_step.png", "memory.png", "perplexity.png", "step_time.png"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A gathered sweep of which one job has failed and one was killed: folder, results, jobs."""
    folder, results = tmp_path_factory.mktemp("sweep"), {}
    for seed in (0, 1):
        for ratio in (0.5, 0.8):
            name = f"ticket-{ratio}-{seed}"
            loss = ratio + seed / 3
            results[name] = write_job(folder / name, "ticket", ratio, seed, test_loss=loss)
        name = f"dense-{seed}"
        results[name] = write_job(folder / name, "dense", None, seed, draw_step=None)
    write_job(folder / "ticket-0.9-0", "ticket", 0.9, error="No <memory> | here\n\nTraceback")
    write_job(folder / "ticket-0.9-1", "ticket", 0.9, 1, finished=False)
    return folder, results, gather(folder)


def test_the_table_has_the_numbers_of_the_runs(sweep):
    folder, results, _ = sweep
    with (folder / "sweep.csv").open() as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert {name for name, row in rows.items() if row["status"] == "finished"} == {*results}
    for name, result in results.items():
        row = rows[name]
        assert float(row["test_perplexity"]) == result.test_perplexity
        assert float(row["validation_perplexity"]) == result.validation_perplexity
        assert float(row["sparse_step_ms"]) == pytest.approx(100)
        assert int(row["largest_state_bytes"]) == 32_000_000
        assert row["draw_step"] == ("" if result.draw_step is None else str(result.draw_step))
    assert rows["ticket-0.9-0"]["test_perplexity"] == ""
    assert rows["ticket-0.9-0"]["error"] == "No <memory> | here"


def test_a_job_without_a_training_batch(tmp_path):
    nothing = {"state_bytes": {}, "reduced_bytes": {}, "step_seconds": {}, "train_loss": None}
    write_job(tmp_path / "ticket-0", "ticket", 0.5, draw_step=None, **nothing)
    write_job(tmp_path / "ticket-1", "ticket", 0.8)
    gather(tmp_path)
    with (tmp_path / "sweep.csv").open() as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    found = [rows[name]["largest_state_bytes"] for name in ("ticket-0", "ticket-1")]
    assert found == ["", "32000000"]


def test_the_summary_has_means_and_spreads(sweep):
    folder, results, _ = sweep
    values = [results[f"ticket-0.8-{seed}"].test_perplexity for seed in (0, 1)]
    shown = f"{sum(values) / 2:.3f} ({min(values):.3f} to {max(values):.3f})"
    dense = [results[f"dense-{seed}"].test_perplexity for seed in (0, 1)]
    against = sum(a / b for a, b in zip(values, dense, strict=True)) / 2 - 1
    text = (folder / "sweep.html").read_text()
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in text.split("<tr>")]
    [row] = [row for row in rows if row[:2] == ["ticket", "0.8"]]
    assert row[3:5] == [shown, f"{against:+.1%}"]


def test_jobs_that_failed_or_were_killed_are_named_with_their_commands(sweep):
    folder, _, jobs = sweep
    text = summary(folder, jobs)
    assert text.startswith("6 of 8 jobs have finished.")
    assert "ticket-0.9-0 has failed: No <memory> | here\n    axosparse-train arm=ticket" in text
    assert "ticket-0.9-1 has not finished: it was killed, or still runs" in text
    for job in jobs:
        assert (job.command in text) == (job.result is None)


def test_the_page_stands_alone(sweep):
    folder, *_ = sweep
    page = (folder / "sweep.html").read_text()
    assert len(re.findall(r'src="data:image/svg\+xml;base64,', page)) == len(PICTURES)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "No &lt;memory&gt; | here" in page
    assert sorted(path.name for path in folder.glob("*.png")) == PICTURES


def test_the_table_is_above_the_curves(sweep):
    page = (sweep[0] / "sweep.html").read_text()
    assert page.index("Mean over seeds") < page.index("<img") < page.index("All jobs")


def test_the_page_says_what_the_numbers_do_not_show(sweep, tmp_path):
    folder, *_ = sweep
    short, no_dense = "Too short to judge quality", "No run of the dense arm has finished"
    assert short not in (folder / "sweep.html").read_text()
    assert no_dense not in (folder / "sweep.html").read_text()
    for seed, tokens in enumerate((0.19, 4.0)):
        write_job(tmp_path / str(seed), "ticket", 0.8, seed, tokens_per_parameter=tokens)
    gather(tmp_path)
    page = (tmp_path / "sweep.html").read_text()
    assert f"{short}: 0.19 tokens per parameter, about 20 are needed." in page
    assert no_dense in page


def test_jobs_whose_ratio_or_seed_is_no_number_are_named_among_the_failed(tmp_path, capsys):
    for number, (ratio, seed) in enumerate([("most", 0), (0.8, "x")]):
        write_job(tmp_path / str(number), "ticket", ratio, seed, error="Sorry")
    write_job(tmp_path / "last", "ticket", 0.8)
    with pytest.raises(SystemExit) as ended:
        GatherResults().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": tmp_path}}}))
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "1 of 3 jobs have finished." in shown
    for place in (tmp_path / "0", tmp_path / "1"):
        assert f"{place.name} has failed: Sorry\n    {Job.read(place).command}\n" in shown
    assert (tmp_path / "sweep.html").exists()


def test_a_report_that_cannot_be_written_fails_the_command(tmp_path):
    (tmp_path / "sweep.csv").mkdir()
    with pytest.raises(SystemExit, match=r"The report of the sweep was not written: .*sweep\.csv"):
        GatherResults().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": tmp_path}}}))


def test_the_command_that_goes_on(tmp_path):
    assert resume_command(tmp_path) is None
    task = ["experiment=ratio_sweep", "seed=0,1", "sample.prompt=${unknown}"]
    overrides = {"task": task, "hydra": ["hydra.mode=MULTIRUN"]}
    OmegaConf.save({"hydra": {"overrides": overrides}}, tmp_path / "multirun.yaml")
    assert resume_command(tmp_path) == (
        "axosparse-train -m experiment=ratio_sweep seed=0,1 'sample.prompt=${unknown}' "
        f"hydra.sweep.dir={tmp_path}"
    )


def test_a_sweep_of_which_nothing_has_finished(tmp_path):
    write_job(tmp_path / "0", "ticket", 0.8, error="Sorry")
    gather(tmp_path)
    assert "0 of 1 jobs" in (tmp_path / "sweep.html").read_text()
    assert not list(tmp_path.glob("*.png"))


def test_the_command_gathers_and_says_what_there_is(tmp_path, capsys):
    write_job(tmp_path / "0", "ticket", 0.8)
    main([str(tmp_path)])
    assert capsys.readouterr().out == (
        f"1 of 1 jobs have finished.\nReport of the sweep: {tmp_path}/sweep.html\n"
    )


def test_a_folder_without_jobs_ends_it(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 1
    assert "No job has begun" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "is not a folder" in capsys.readouterr().err


def test_runs_are_compared_with_dense_ones_of_the_same_settings():
    dense = [Point("dense", (f"model.depth={depth}",), None, []) for depth in (2, 4)]
    pruned = [Point("ticket", (f"model.depth={depth}",), 0.8, []) for depth in (2, 4, 6)]
    assert [dense_beside(point, [*dense, *pruned]) for point in pruned] == [*dense, None]
