"""The commands in README and docs are ones that there are, with arguments that they take.

Those of the package run here, as they stand but small and with all stages in one process; sweeps
run their first job. Those of the examples run in the tests of the examples, smaller. Those that
need a network, a cluster or make are checked for what they name.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import DictConfig
from torch import nn

from axosparse_commands.overrides import config_folder
from lightning_axosparse import Ticket, save_safetensors, sparsify
from lightning_axosparse.cli import plan, sweep
from lightning_axosparse.cli.evaluate import METRICS, evaluate
from lightning_axosparse.cli.job import RESULT
from lightning_axosparse.cli.train import train
from lightning_axosparse.examples.gpt import GPT
from tests.cli.sweep.jobs import write_job
from tests.test_docs import PAGES, REPOSITORY

EXAMPLES = REPOSITORY / "examples"
PROJECT = (REPOSITORY / "pyproject.toml").read_text()
COMPOSED = "axosparse-train", "axosparse-eval"
"""The commands whose arguments Hydra reads; they run."""


def commands() -> list[str]:
    """Every command of a bash block, without comments and continued lines in one."""
    pages = [*PAGES, REPOSITORY / "CONTRIBUTING.md", EXAMPLES / "README.md"]
    blocks = [
        block
        for page in pages
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    shown = [line for line in lines if line.strip() and not line.startswith("#")]
    table = re.findall(r"\| `([^`]+)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return sorted({*shown, *table})


def composed(name: str, arguments: list[str]) -> DictConfig:
    """Compose a run, of a sweep the first."""
    parsed = OverridesParser.create().parse_overrides([a for a in arguments if a != "-m"])
    overrides = [
        f"{override.get_key_element()}={first_value(override)}"
        if override.is_sweep_override()
        else override.input_line
        for override in parsed
    ]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose(name, overrides, return_hydra_config=True)


def first_value(override: Override) -> object:
    """The first value of a sweep, or the least one of an interval."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        return value.start
    return next(override.sweep_string_iterator())


def exists(file: str) -> None:
    assert list(EXAMPLES.rglob(file)), file


class MyModule(BoringModel):
    """A module of a user."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(self.layer, nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch)))


RUNS = sorted(
    {
        shlex.join(shlex.split(command, comments=True))
        for command in commands()
        if command.startswith(COMPOSED)
    }
)
SMALL = "callbacks.timeline=null trainer.max_epochs=1 trainer.enable_progress_bar=false"
SMALL_GPT = "data.max_held_out=2 data.max_bytes=10000 data.context=8 data.batch_size=4 "
SMALL_GPT += "model.width=24"
HERE = "++strategy.transport=loopback trainer.devices=1 trainer.limit_train_batches=2"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the commands name."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("Call me Ishmael. " * 100)
    (tmp_path / "my_project.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringDataModule as MyData\n"
        "from tests.test_commands import MyModule\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    return tmp_path


def saved(name: str, own: bool) -> None:
    """Write the file of weights that a command names."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        model = GPT(width=192, depth=6, heads=6, context=8)
        sparsify(model, Ticket.magnitude(model, 0.8).masks)
        save_safetensors(model, path)
        return
    trainer = L.Trainer(
        accelerator="cpu", fast_dev_run=True, enable_progress_bar=False, enable_model_summary=False
    )
    shape = {"width": 8, "depth": 4, "heads": 2, "context": 8}
    trainer.strategy.connect(MyModule() if own else GPT(**shape))
    trainer.save_checkpoint(path)


QUICK = (
    "axosparse-train experiment=smoke",
    "axosparse-eval checkpoint=pruned.safetensors model.width=192 model.depth=6 'loops=[test]'",
)
"""Commands that `make test` runs; it composes what the others would run."""


@pytest.mark.parametrize(
    "command",
    [pytest.param(run, marks=[pytest.mark.slow] * (run not in QUICK)) for run in RUNS],
)
def test_a_command_of_the_package_runs(command: str, folder: Path) -> None:
    program, *arguments = shlex.split(command)
    own = "model=own" in arguments
    gpt = [] if own else SMALL_GPT.split()
    if {"hydra/launcher=slurm", "hparams_search=optuna"} & set(arguments):
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    if program == "axosparse-eval":
        (file,) = (a.removeprefix("checkpoint=") for a in arguments if a.startswith("checkpoint="))
        saved(file, own)
        few = [*HERE.split()[:2], "sample.length=2", "folder=out"]
        assert evaluate(composed("eval", [*gpt, *arguments, *few]))
        assert (folder / "out" / METRICS).exists()
        return
    few = [*HERE.split(), "trainer.max_epochs=1", "sample.length=2", "folder=out"]
    train(composed("config", [*SMALL.split(), *gpt, *arguments, *few]))
    assert (folder / "out" / RESULT).exists()


def test_arguments_of_every_command_compose() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    assert {*QUICK} < {*RUNS}
    for program, *arguments in map(shlex.split, RUNS):
        found = composed("eval" if program == "axosparse-eval" else "config", arguments)
        assert found.strategy
        assert found.model


def test_a_sweep_is_gathered_by_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = {c for c in commands() if c.startswith("axosparse-sweep")}
    write_job(folder / command.split()[1] / "ticket-0.8-seed0", "ticket", 0.8, ticket=True)
    monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
    sweep.main()
    assert "1 of 1 jobs have finished" in capsys.readouterr().out


def test_a_plan_is_made_by_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in {c for c in commands() if c.startswith("axosparse-plan")}:
        plan.main(shlex.split(command, comments=True)[1:])
        assert "gpt3-2.7b, 80% of the weights pruned" in capsys.readouterr().out
    assert (folder / "step.png").stat().st_size > 0


def test_the_commands_of_the_package_are_shown() -> None:
    shown = {command.split()[0] for command in commands()}
    scripts = re.findall(r'^(axosparse-\w+) = "(.*):(\w+)"$', PROJECT, re.MULTILINE)
    assert len(scripts) == 4
    for name, module, function in scripts:
        assert name in shown
        assert hasattr(import_module(module), function)
