"""The commands in README and docs are ones that there are, with arguments that they take.

They are parsed and composed here, and run in the tests of the commands and of the examples. Those
that need a network, a cluster or make are checked for what they name.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_axosparse.cli import plan
from lightning_axosparse.cli.train import configuration
from tests.test_docs import PAGES, REPOSITORY, text

EXAMPLES = REPOSITORY / "examples"
PROJECT = (REPOSITORY / "pyproject.toml").read_text()


def commands() -> list[str]:
    """Every command of a bash block, without comments and continued lines in one."""
    pages = [*PAGES, REPOSITORY / "CONTRIBUTING.md", EXAMPLES / "README.md"]
    blocks = [
        block for page in pages for block in re.findall(r"```bash\n(.*?)```", text(page), re.DOTALL)
    ]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    shown = [line for line in lines if line.strip() and not line.startswith("#")]
    table = re.findall(r"\| `([^`]+)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return sorted({*shown, *table})


def composed(name: str, arguments: list[str]) -> None:
    """Compose a run, of a sweep the first."""
    parsed = OverridesParser.create().parse_overrides([a for a in arguments if a != "-m"])
    overrides = [
        f"{override.get_key_element()}={next(override.sweep_string_iterator())}"
        if override.is_sweep_override()
        else override.input_line
        for override in parsed
    ]
    with initialize_config_dir(str(configuration()), version_base="1.3"):
        compose(name, overrides, return_hydra_config=True)


def exists(file: str) -> None:
    assert list(EXAMPLES.rglob(file)), file


@pytest.mark.parametrize("command", commands())
def test_the_command_is_one(command: str) -> None:
    if "." in command.split()[:1]:
        return  # . .venv/bin/activate
    program, *arguments = shlex.split(command, comments=True)
    match program:
        case "axosparse-train" | "axosparse-eval":
            if {"hydra/launcher=slurm", "hparams_search=optuna"} & set(arguments):
                pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
                pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
            composed("config" if program.endswith("train") else "eval", arguments)
        case "axosparse-plan":
            plan._parser().parse_args(arguments)
        case "axosparse-sweep":
            assert len(arguments) == 1
        case "python" | ".venv/bin/python" if arguments[0] == "-m":
            assert find_spec(arguments[1])
        case "python" | "sbatch":
            exists(arguments[0])
        case "mpiexec" | "srun":
            exists(arguments[arguments.index("python") + 1])
        case "make":
            assert re.search(
                rf"^{arguments[0]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE
            )
        case "pip":
            assert arguments[0] == "install"
            for extras in re.findall(r"\[([\w,]+)\]", command):
                for extra in extras.split(","):
                    assert re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE)
        case "python3":
            assert arguments[:2] == ["-m", "venv"]
        case _:
            raise AssertionError(f"unknown: {command}")


def test_the_commands_of_the_package_are_shown() -> None:
    shown = {command.split()[0] for command in commands()}
    scripts = re.findall(r'^(axosparse-\w+) = "(.*):(\w+)"$', PROJECT, re.MULTILINE)
    assert len(scripts) == 4
    for name, module, function in scripts:
        assert name in shown
        assert hasattr(import_module(module), function)


def test_links_between_examples_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", (EXAMPLES / "README.md").read_text()):
        assert Path(EXAMPLES / target).exists(), target
