from __future__ import annotations

import csv
import json
import subprocess
import sys
from functools import cache
from itertools import zip_longest
from pathlib import Path

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from axosparse_commands.overrides import config_folder
from lightning_axosparse import ExpertParallel, TensorParallel
from lightning_axosparse.callbacks.report.facts import RunResult
from lightning_axosparse.cli import train as entry
from lightning_axosparse.cli.job import settings_of
from lightning_axosparse.cli.train import RunFolder, one_line_errors, printable, train
from lightning_axosparse.strategy.launcher import mpiexec
from tests.cli.sweep.jobs import write_job
from tests.ranks import PATIENCE, warm_python

GROUPS = [folder.name for folder in sorted(config_folder().iterdir()) if folder.is_dir()]
CHANGE_OTHERS = {"arm", "debug", "experiment", "hparams_search"}
"""Groups whose choices change those of other groups."""


def choices() -> list[list[str]]:
    """Every choice of every group; several at once of groups that do not change others."""
    found = {
        group: [f"{group}={file.stem}" for file in sorted((config_folder() / group).glob("*.yaml"))]
        for group in GROUPS
    }
    alone = [[choice] for group in CHANGE_OTHERS & {*GROUPS} for choice in found.pop(group)]
    together = zip_longest(*found.values())
    return sorted(alone) + [[choice for choice in each if choice] for each in together]


OWN = {
    "model=own": ["model._target_=lightning.pytorch.demos.boring_classes.BoringModel"],
    "data=own": ["data._target_=lightning.pytorch.demos.boring_classes.BoringDataModule"],
}
SMALL = ["experiment=smoke", "trainer.enable_progress_bar=false"]
TINY = ["model.depth=1", "model.width=16", "data.context=8", "data.max_held_out=4"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("One ring to rule them all, one ring to find them. " * 400)
    return path


def configured(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", list(overrides))


@cache
def smoke() -> DictConfig:
    """A small job; each composition takes a third of a second."""
    return configured(*SMALL, "folder=here")


def run_train(folder: Path, *overrides: str) -> str:
    """What the command prints in a folder, as a script of its own."""
    script = folder / "run.py"
    script.write_text("from lightning_axosparse.cli import train\ntrain.main()\n")
    return subprocess.run(
        [*warm_python(), str(script), *overrides],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        timeout=PATIENCE,
    ).stdout


@pytest.mark.parametrize("chosen", choices(), ids=" ".join)
def test_every_choice_composes_and_describes_objects_that_exist(chosen, tmp_path):
    # An experiment may override a group, so a choice is added to the defaults by its own name.
    own = [value for choice in chosen for value in OWN.get(choice, [])]
    config = configured(*chosen, *own, f"folder={tmp_path / 'job'}")
    if chosen[0].startswith("arm="):
        write_job(tmp_path / "ticket-0.8-seed0", "ticket", 0.8, ticket=True)  # that others take
    OmegaConf.resolve(config)
    assert isinstance(instantiate(config.model), L.LightningModule)
    assert isinstance(instantiate(config.data), L.LightningDataModule)
    for callback in [*config.callbacks.values(), config.pruning.callback]:
        assert callback is None or isinstance(instantiate(callback), L.Callback)
    if isinstance(config.strategy, DictConfig):
        strategy = instantiate(config.strategy).config
        assert config.trainer.devices % strategy.ranks_per_pipeline == 0


def test_ranks_share_layers_by_overrides():
    strategy = instantiate(configured("folder=here").strategy).config
    assert (strategy.tensor_parallel, strategy.expert_parallel) == (
        TensorParallel(1),
        ExpertParallel(1),
    )
    strategy = instantiate(
        configured(
            "folder=here",
            "strategy.tensor_parallel.ranks=2",
            "strategy.expert_parallel.ranks=4",
            "strategy.expert_parallel.experts=layers.*.experts",
        ).strategy
    ).config
    assert strategy.tensor_parallel == TensorParallel(2)
    assert strategy.expert_parallel == ExpertParallel(4, "layers.*.experts")
    numbers = configured(
        "folder=here", "strategy.tensor_parallel=2", "strategy.expert_parallel=2"
    ).strategy
    assert instantiate(numbers).config.tensors == TensorParallel(2)


def test_a_configuration_file_gives_a_plan():
    plan = """
      layers.*.up: {_target_: torch.distributed.tensor.parallel.ColwiseParallel}
      layers.*.down: {_target_: torch.distributed.tensor.parallel.RowwiseParallel}
    """
    config = configured("folder=here", "strategy.tensor_parallel.ranks=2").strategy
    config.tensor_parallel.plan = OmegaConf.create(plan)
    plan = instantiate(config).config.tensor_parallel.plan
    assert {name: type(style) for name, style in plan.items()} == {
        "layers.*.up": ColwiseParallel,
        "layers.*.down": RowwiseParallel,
    }


def test_ratio_reaches_the_callback():
    config = configured("pruning.ratio=0.35")
    assert instantiate(config.pruning.callback).pruning_ratio == 0.35


@pytest.mark.parametrize(
    ("overrides", "heads"), [([], 6), (["model.width=256"], 4), (["model.heads=3"], 3)]
)
def test_a_width_alone_has_heads_that_divide_it(overrides, heads):
    assert configured("folder=here", *overrides).model.heads == heads


def test_the_model_has_an_example_to_time_its_layers_on():
    model = instantiate(configured("folder=here").model)
    batch = model.example_input_array
    assert model(batch).shape == (*batch.shape, 256)


def test_printable_text_moves_no_cursor():
    assert printable("if x:\n    y\x1b[2J\x07") == "if x:\n    y�[2J�"


@pytest.mark.parametrize(
    "strategy", [["strategy=single"], ["strategy.g_inter=1", "trainer.devices=1"]]
)
def test_one_rank_from_start_to_report(strategy, text, tmp_path, capsys):
    config = configured(*SMALL, *strategy, *TINY, f"data.path={text}", f"folder={tmp_path}")
    loss = train(config)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["final"]["loss"] == pytest.approx(loss)
    assert report["test"]["loss"] == pytest.approx(loss, abs=0.5)
    assert (report["draw"] is None) == (strategy == ["strategy=single"])
    result = RunResult.load(tmp_path / "result.jsonl")
    assert result.settings == settings_of(config)
    assert result.test_loss == report["test"]["loss"]
    shown = capsys.readouterr().out
    for words in ["Quality", "test, at the end", "The model writes", "def ", str(tmp_path)]:
        assert words in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.heads=time", "model: heads='time' must be a whole number"),
        ("model.heads=5", "model: heads=5 must divide width=32"),
        ("model.learning_rate=fast", "model: learning_rate='fast' must be a finite number"),
        ("data.context=long", "data: context='long' must be"),
        ("data.context=100000", "data: Too little text"),
        ("data.path=no/such/file", "data: No text found"),
        ("pruning.ratio=2", "pruning.callback: pruning_ratio=2 must be"),
        ("strategy.g_inter=1000000000", "trainer: g_inter=1000000000 stages"),
        ("strategy.balance=[1,2]", "balance=[1, 2] must give each of the 2 stages"),
        ("strategy.pipeline=layers", "pipeline='layers' must name"),
        ("strategy.loss=some", "trainer.strategy: loss='some' must be"),
        ("strategy.timeout=0", "trainer.strategy: timeout=0 must be a number of seconds"),
        ("strategy._target_=no.Such", "trainer.strategy: Error loading 'no.Such'"),
        ("trainer.max_epochs=many", "trainer.max_epochs='many' must be int."),
        ("trainer.limit_train_batches=few", "trainer.limit_train_batches='few' must be int or"),
        ("trainer.devices=none", "trainer: `devices` selected with `CPUAccelerator`"),
        ("seed=x", "seed='x' must be a whole number"),
        ("sample.prompt=''", "sample.prompt='' must be"),
    ],
)
def test_a_value_of_no_use_is_an_error_in_words_before_any_rank_starts(
    override: str, message: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(mpiexec, "start", start)
    paths = {"folder": str(tmp_path), "data": {"path": str(text)}}
    config = OmegaConf.merge(smoke(), paths, OmegaConf.from_dotlist([override]))
    assert isinstance(config, DictConfig)
    with pytest.raises(SystemExit) as ended, one_line_errors("axosparse-train"):
        train(config)
    assert str(ended.value.code).startswith(f"axosparse-train: {message}")


def test_a_value_of_no_use_ends_the_command_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["axosparse-train", *SMALL, "model.heads=time"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    words = "axosparse-train: model: heads='time' must be a whole number"
    assert str(ended.value.code).startswith(words)


def test_the_whole_error_is_raised_where_hydra_is_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["axosparse-train", *SMALL, "model.heads=time"])
    with pytest.raises(InstantiationException):
        entry.main()


class Untested(BoringModel):
    """Has no ``test_step``, fails or diverges if told to, and has a name of its own for a loss."""

    test_step = L.LightningModule.test_step

    def __init__(self, fails: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.fails, self.factor = fails, factor

    def validation_step(self, batch, batch_idx):
        if self.fails:
            raise ArithmeticError("told to")
        self.log("valid/loss", self.factor * self.loss(self(batch)))


def test_a_job_returns_the_loss_of_its_name_or_none_for_a_sweeper(tmp_path, caplog):
    def value(*overrides):
        own = [f"model._target_={__name__}.Untested", *OWN["data=own"], "model=own", "data=own"]
        quiet = ["strategy=single", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
        quiet += [
            "callbacks.timeline=null",
            "++trainer.limit_train_batches=2",
        ]
        name = "callbacks.report.val_loss=valid/loss"
        folder = f"folder={tmp_path}/{len([*tmp_path.iterdir()])}"
        return entry._job_of_sweep(configured(*own, *quiet, name, folder, *overrides))

    assert 0 < value() < 100
    assert value("+model.factor=nan") is None
    assert value("+model.fails=true") is None
    assert "Failed: told to" in caplog.text


@pytest.mark.parametrize("how", ["default", "fdr", "limit", "overfit", "profiler"])
def test_debugging_a_run_in_one_process(how, text, tmp_path):
    small = [*TINY, "data.max_bytes=2000", "pruning.compute=dense", "callbacks.timeline=null"]
    small += ["strategy.microbatches=2"]
    small += ["trainer.max_epochs=2"] * (how == "overfit")
    small += ["trainer.detect_anomaly=false"] * (how != "fdr")  # it takes long
    config = configured(*SMALL, f"debug={how}", f"data.path={text}", f"folder={tmp_path}", *small)
    assert config.trainer.devices == 1
    train(config)
    report = json.loads((tmp_path / "report.json").read_text())
    batches = {"default": 4, "fdr": 1, "limit": 12, "overfit": 6, "profiler": 4}
    assert len(report["losses"]) == batches[how]
    assert bool(list(tmp_path.glob("fit-profile*.txt"))) == (how == "profiler")
    assert (report["draw"] is None) == (how == "overfit")


def test_a_search_finds_the_better_rate(text, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = tmp_path / "search"
    small = [*TINY, "hydra.sweeper.n_trials=2", "debug=fdr", f"data.path={text}"]
    small += ["strategy.microbatches=2", "trainer.detect_anomaly=false", "callbacks.timeline=null"]
    search = ["hparams_search=optuna", f"hydra.sweep.dir={folder}"]
    run_train(tmp_path, *SMALL, *small, *search)
    results = [RunResult.load(folder / str(job) / "result.jsonl") for job in range(2)]
    found = OmegaConf.load(folder / "optimization_results.yaml")
    assert found.best_value == min(result.validation_loss for result in results)
    rates = {result.settings["model"]["learning_rate"] for result in results}
    assert len(rates) == 2
    assert found.best_params["model.learning_rate"] in rates
    assert all(5e-4 <= rate <= 1e-2 for rate in rates)


def test_a_job_of_slurm_has_one_task_with_a_core_for_each_rank():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        overrides = ["hydra/launcher=slurm", "trainer.devices=6"]
        config = compose("config", overrides, return_hydra_config=True)
    launcher = config.hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher")
    assert (launcher.nodes, launcher.tasks_per_node, launcher.cpus_per_task) == (1, 1, 6)


def test_a_vgg_loses_channels_on_two_ranks(tmp_path):
    small = ["trainer.max_epochs=2", "trainer.limit_train_batches=3", "pruning.draw_by=4"]
    small += ["+trainer.limit_val_batches=2", "+trainer.limit_test_batches=2"]
    shape = ["model.blocks=[[4,4],[8]]", "trainer.enable_progress_bar=false"]
    vgg = ["experiment=vgg_early_bird", f"hydra.run.dir={tmp_path}"]
    printed = run_train(tmp_path, *vgg, *small, *shape)
    for words in ["accuracy", "Channels of each layer", "model.0.1", "fewer channels"]:
        assert words in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["draw"]["step"], report["draw"]["pruning_ratio"]) == (4, 0.5)
    before, after = zip(*report["draw"]["channels"].values(), strict=True)
    assert (sum(before), sum(after)) == (16, 8)
    assert 0 < report["test"]["accuracy"] <= 1
    assert [rank["stage"] for rank in report["ranks"]] == [1, 0]
    for rank in report["ranks"]:
        weights = {period: work["state"]["weights"] for period, work in rank["work"].items()}
        assert weights["sparse"] < weights["dense"]


def test_every_grid_of_two_ranks_trains(text, tmp_path):
    folder = tmp_path / "sweep"
    small = ["model.width=32", "model.depth=3", "model.heads=2", "data.context=32"]
    small += ["trainer.max_epochs=3", "trainer.limit_train_batches=4", "data.max_held_out=16"]
    small += ["pruning.start=2", "pruning.end=4", f"data.path={text}"]
    sweep = ["-m", "experiment=grid_scaling", "trainer.devices=2", f"hydra.sweep.dir={folder}"]
    run_train(tmp_path, *sweep, *small, "trainer.enable_progress_bar=false")
    reports = {}
    for stages in (1, 2):
        job = folder / f"stages-{stages}"
        reports[stages] = report = json.loads((job / "report.json").read_text())
        places = [(rank["stage"], rank["replica"]) for rank in report["ranks"]]
        assert places == [(stages - 1 - rank % stages, rank // stages) for rank in range(2)]
        for name in ["report.html", "loss.png", "gantt.png", "ticket.pt"]:
            assert (job / name).stat().st_size > 0
        assert list((job / "checkpoints").glob("*.ckpt"))
        assert list(job.rglob("metrics.csv"))
    # Not of the same windows: Lightning's distributed sampler has an order of its own.
    assert len(reports[1]["losses"]) == len(reports[2]["losses"]) == 12
    assert reports[1]["losses"] == pytest.approx(reports[2]["losses"], rel=0.05)
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["stages"], row["replicas"]) for row in rows] == [
        ("stages-1", "1", "2"),
        ("stages-2", "2", "1"),
    ]


def test_a_batch_is_the_same_on_every_grid():
    sizes = {
        stages: configured("experiment=grid_scaling", f"strategy.g_inter={stages}", "folder=here")
        for stages in (1, 2, 4)
    }
    assert {n: config.data.batch_size for n, config in sizes.items()} == {1: 4, 2: 8, 4: 16}


def test_a_batch_that_replicas_cannot_share_is_refused():
    with pytest.raises(InterpolationResolutionError, match="cannot be divided by 3 replicas"):
        OmegaConf.resolve(
            configured(
                "folder=here",
                "experiment=grid_scaling",
                "trainer.devices=3",
                "strategy.g_inter=1",
            )
        )


# A folder that cannot be made ends a command with one line.


def test_the_folder_is_made(tmp_path: Path) -> None:
    callback = RunFolder()
    config = {"run": {"dir": f"{tmp_path}/a/b"}, "sweep": {"dir": f"{tmp_path}/c"}}
    callback.on_run_start(OmegaConf.create({"hydra": config}))
    callback.on_multirun_start(OmegaConf.create({"hydra": config}))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("train", "hydra.run.dir"),
        ("evaluate", "hydra.run.dir"),
        ("train -m", "hydra.sweep.dir"),
    ],
)
def test_a_command_says_which_folder_it_cannot_make(
    command: str, folder: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    module, *flags = command.split()
    start = [*warm_python(), "-m", f"lightning_axosparse.cli.{module}", *flags]
    done = subprocess.run(
        [*start, f"{folder}={tmp_path}/file/nope", "seed=0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{folder}={tmp_path}/file/nope cannot be made: Not a directory.")
    assert "Traceback" not in done.stderr
