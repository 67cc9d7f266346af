"""Workflows, issue templates, CITATION.cff: they are valid, and what they name exists."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_axosparse
from tests.test_docs import REPOSITORY

tomllib = pytest.importorskip("tomllib")  # of Python 3.11
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_there_is_one_for_each_task() -> None:
    assert {path.stem for path in WORKFLOWS} == {"test", "docs", "release"}
    versions = read(GITHUB / "workflows" / "test.yml")["jobs"]["versions"]["strategy"]["matrix"]
    oldest, newest = versions["include"]
    assert oldest == {"python": PROJECT["requires-python"][2:], "resolution": "lowest-direct"}
    assert newest["resolution"] == "highest"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_what_github_asks_for(path: Path) -> None:
    workflow = read(path)
    assert workflow[True]  # YAML reads the key `on` as a bool
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|release/v1)", step["uses"])
            if "deploy-pages" in step.get("uses", ""):
                assert job["environment"]["name"] == "github-pages"
                assert job["permissions"] == {"pages": "write", "id-token": "write"}
            if "pypi-publish" in step.get("uses", ""):
                assert job["permissions"]["id-token"] == "write"  # trusted publishing


def lines() -> list[str]:
    return [
        line
        for path in WORKFLOWS
        for job in read(path)["jobs"].values()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
    ]


@pytest.mark.parametrize("line", lines())
def test_a_command_of_a_workflow_is_one(line: str) -> None:
    program, *arguments = shlex.split(re.sub(r"\$\{\{.*?\}\}", "VALUE", line))
    match program:
        case "bash":
            assert (REPOSITORY / arguments[0]).exists()
        case "pip" | "uv":
            assert arguments[0] in ("config", "install", "venv", "pip")
            for file in re.findall(r"-c (\S+)", line):
                assert (REPOSITORY / file).exists()
            for extras in re.findall(r"\.\[([\w,]+)\]", line):
                assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
        case "make":
            makefile = (REPOSITORY / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in arguments)
        case "mkdocs":
            assert arguments == ["build"]
            assert find_spec("mkdocs")
        case ".venv/bin/python" | "python":
            assert arguments[0] == "-m"
            assert arguments[1] == "build" or find_spec(arguments[1])
        case "test":  # the tag is the version
            code = re.search(r"python -c '(.*)'\)", line)
            assert code is not None
            compile(code[1], line, "exec")
        case _:
            raise AssertionError(f"unknown: {line}")


def test_a_release_has_the_version_of_the_package() -> None:
    assert PROJECT["version"] == lightning_axosparse.__version__
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", changes, re.MULTILINE)


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=str)
def test_an_issue_template_is_a_form(path: Path) -> None:
    form = read(path)
    assert form.keys() >= {"name", "description", "body"}
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "markdown", "checkboxes")
        assert field["attributes"]["label"]
    for code in re.findall(r'python -c "(.*?)"', path.read_text()):
        compile(code, str(path), "exec")


def test_the_citation_is_of_this_version() -> None:
    citation = read(REPOSITORY / "CITATION.cff")
    assert citation.keys() >= {"cff-version", "title", "message", "authors"}
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    for work in citation["references"]:
        assert work["type"]
        assert work["title"]
        assert all({"family-names", "given-names"} == author.keys() for author in work["authors"])
