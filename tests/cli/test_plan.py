import re
from pathlib import Path

import pytest

from lightning_axosparse.cli.plan import main

SMALL = ["--model", "gpt2", "--devices", "4", "--batch", "16", "--best", "3"]


def test_the_command_prints_a_table_for_each_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--pruning-ratio", "0", "0.9"])
    printed = capsys.readouterr().out
    assert "gpt2, dense weights" in printed
    assert "gpt2, 90% of the weights pruned" in printed
    assert "1 x 4" in printed
    assert "…" not in printed


def test_the_command_draws_the_best_plans(tmp_path: Path) -> None:
    file = tmp_path / "step.png"
    main([*SMALL, "--memory", "2.5", "--recompute", "--gantt", str(file)])
    assert file.read_bytes().startswith(b"\x89PNG")


def test_divided_optimizer_state_makes_shorter_pipelines_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = []
    for divided in ([], ["--shard-optimizer"]):
        main([*SMALL, "--best", "80", "--memory", "2.6", *divided])
        printed.append(capsys.readouterr().out)
    assert ["1 x 4" in text for text in printed] == [False, True]


def test_state_is_divided_on_grids_that_spread_experts_and_split_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--experts", "4", "2", "--tensor", "1", "2", "--shard-optimizer"]
    main([*SMALL, "--best", "200", *options])
    printed = capsys.readouterr().out
    assert re.search(r"\d x 2 x \d+ ", printed)
    assert re.search(r"\d x \d+ \([2-9]\)", printed)


def test_a_model_may_be_given_by_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for model in (["--model", "gpt2"], ["--shape", "12", "768", "12", "1024", "50257"]):
        main(["--devices", "4", "--batch", "16", *model])
        printed.append(capsys.readouterr().out)
    assert "12x768x12x1024x50257, dense weights" in printed[1]
    assert printed[0].splitlines()[1:] == printed[1].splitlines()[1:]


def test_a_model_that_does_not_fit_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--memory", "0.01"])
    assert ended.value.code == 1
    assert "Pruning ratio 0: Nothing fits: a device has 0.01 GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pruning-ratio", "1"], "'1' is not a ratio"),
        (["--pruning-ratio", "most"], "'most' is not a ratio"),
        (["--best", "0"], "'0' is not a count"),
        (["--devices", str(10**30)], "is not a count: a whole number, 1 or more"),
        (["--efficiency", "0"], "'0' is not a fraction"),
        (["--efficiency", "50"], "'50' is not a fraction"),
        (["--experts", "8", "2", "1"], "how many compute each token"),
        (["--experts", "2", "8"], "8 of 2 experts cannot compute a token. Give at most 2"),
        (["--shape", "4", "65", "4", "64", "256"], "WIDTH 65 is no multiple of HEADS 4, but"),
        (["--shape", "4", "65", "4", "64", "256"], "such as WIDTH 68"),
        (["--tensor", "2", "3", "--devices", "4"], "--tensor: 3 ranks that share layers do not"),
        (["--tensor", "2", "3", "--devices", "4"], "divide 4 devices. Choose a divisor of 4"),
        (["--latency", "nan"], "'nan' is not a finite number, at least 0"),
        (["--latency=-5"], "'-5' is not a finite number"),
        (["--overhead", "inf"], "'inf' is not a finite number"),
        (["--network-bandwidth", "inf"], "'inf' is not a positive number"),
        (["--gantt", "step.txt"], "'step.txt' is not a .png file"),
        (["--gantt", "no/such/folder/step.png"], "in a folder that exists"),
    ],
)
def test_arguments_out_of_range_are_rejected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
