"""The commands in the READMEs of the benchmarks name modules, with arguments that they take.

The measurements take minutes each, and some need a GPU or a cluster, as their READMEs say. So each
starts here, all of them in one process, and ends when it has read its arguments.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

from tests.ranks import PATIENCE, REPOSITORY, warm_python

START = """
import argparse, contextlib, importlib, io, json, runpy, sys, traceback

class HasRead(BaseException):
    pass

def read(parser, *arguments, **options):
    plain(parser, *arguments, **options)
    raise HasRead

plain, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, read
wrong = {}
for command, (module, *arguments) in json.load(open("commands.json")).items():
    sys.argv, printed = [module, *arguments], io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            if module in ("benchmarks.files.sizes", "benchmarks.published.run"):
                assert importlib.import_module(module).main and not arguments
            else:
                runpy.run_module(module, run_name="__main__")
                wrong[command] = "has not read its arguments"
    except HasRead:
        pass
    except SystemExit as end:
        if "axonn is missing" not in str(end):  # of the extra `bench`
            wrong[command] = f"{printed.getvalue()} {end}"
    except BaseException:
        wrong[command] = printed.getvalue() + traceback.format_exc()
with open("wrong.json", "w") as file:
    json.dump(wrong, file)
"""
"""Starts the commands; two take no arguments."""


def commands() -> dict[str, list[str]]:
    """Each command, its module and its arguments, those in brackets too."""
    found = {}
    for readme in sorted((REPOSITORY / "benchmarks").glob("*/README.md")):
        for line in re.findall(
            r"^(?:    )?((?:\S.* )?python .*)$", readme.read_text(), re.MULTILINE
        ):
            words = shlex.split(re.sub(r"[\[\]]", "", line), comments=True)
            _, start, *rest = words[words.index("python") :]
            module = [start.removesuffix(".py").replace("/", ".")] if start != "-m" else []
            for name, run in starts([*module, *rest]).items():
                found[f"{readme.parent.name}: {line} {name}"] = run
    return found


def starts(command: list[str]) -> dict[str, list[str]]:
    """What a command starts: the GPU's starts four others."""
    module, *arguments = command
    if module != "benchmarks.gpu":
        return {"": command}
    names = ("training", "kernels", "products", "step")
    return {name: [f"{module}.{name}", *arguments] for name in names}


def test_every_command_reads_its_arguments(tmp_path: Path) -> None:
    assert len(commands()) > 30
    folders = {path.parent.name for path in (REPOSITORY / "benchmarks").glob("*/README.md")}
    assert {command.partition(":")[0] for command in commands()} == folders
    (tmp_path / "commands.json").write_text(json.dumps(commands()))
    (tmp_path / "start.py").write_text(START)
    subprocess.run([*warm_python(), "start.py"], cwd=tmp_path, check=True, timeout=PATIENCE)
    assert json.loads((tmp_path / "wrong.json").read_text()) == {}
