"""What README and docs name exists: files, folders, modules, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_axosparse
from lightning_axosparse.cli.sweep import CURVES

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_axosparse"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
API = sorted((REPOSITORY / "docs" / "api").glob("*.md"))
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()


def inline_code(text: str) -> list[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


PATHS = {
    code for code in inline_code(ARCHITECTURE) if re.fullmatch(r"[\w./]*(\.py|\.yaml|/)", code)
}


def test_paths_exist() -> None:
    rooms = (PACKAGE / name for name in ("distributed", "strategy", "callbacks"))
    roots = [REPOSITORY, PACKAGE, *rooms]
    assert {"pipeline/engine.py", "support/"} <= PATHS
    assert [
        path for path in sorted(PATHS) if not any((root / path).exists() for root in roots)
    ] == []


OF_OTHERS = {
    "fit-profile.txt": "Lightning's profiler",
    "hpc_ckpt_N.ckpt": "Lightning, as N goes up",
    "my_project.py": "the user",
    "optimization_results.yaml": "Optuna's sweeper",
    **{f"{name}.png": "a sweep, a picture for each curve" for name in CURVES},
}
"""File that a page names -> who writes it; all others are written under names in the sources."""
FILE = r"[\w./-]*\w\.(json|jsonl|html|png|svg|csv|txt|pt|yaml|yml|toml|md|py|sh|ipynb|ckpt)"


def test_files_that_a_page_names_exist_or_are_written() -> None:
    names = ["axosparse_commands", "conf", "docs", "examples", "benchmarks", "notebooks", "tests"]
    folders = [PACKAGE, *(REPOSITORY / name for name in [*names, ".github"])]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    there = {path.name for path in [*files, *REPOSITORY.glob("*")]}
    code = [path for path in files if path.suffix in (".py", ".yaml") and "tests" not in path.parts]
    sources = "\n".join(path.read_text() for path in code)
    named = {
        code.rpartition("/")[2]
        for page in [*PAGES, *(REPOSITORY / "benchmarks").glob("*/README.md")]
        for code in inline_code(page.read_text())
        if re.fullmatch(FILE, code)
    }
    assert {"report.html", "ticket.pt", "metrics.json"} <= named
    missing = {name for name in named - there if name not in sources}
    assert missing == OF_OTHERS.keys()


def test_links_lead_somewhere() -> None:
    links = [
        (page, target)
        for page in [*PAGES, *API]
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    ]
    for page, target in links:
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:|\.\./\.\./actions/", target):  # of GitHub, which has that page
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), (page, target)
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_a_short_navigation_leads_to_every_page() -> None:
    docs = REPOSITORY / "docs"
    _, _, navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")
    reached = {docs / name for name in re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)}
    assert len(reached) <= 20
    pages = {*PAGES[1:], *API, *(REPOSITORY / "benchmarks").glob("*/README.md")}
    notebooks = {*(REPOSITORY / "notebooks").glob("*.ipynb")}
    new = reached
    while new:
        targets = {
            (page.parent / target).resolve()
            for page in new & pages
            for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        }
        new = targets - reached
        reached = reached | targets
    assert (pages | notebooks) - reached == set()


def test_files_that_a_page_shows_are_those_of_the_examples() -> None:
    shown = [
        block
        for page in PAGES
        for block in re.findall(r"<!-- (\S+) -->\n```\w*\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert len(shown) >= 3
    for path, code in shown:
        assert code == (REPOSITORY / path).read_text(), path


def test_every_public_name_has_its_docstring_on_a_page() -> None:
    pages = "\n".join(page.read_text() for page in API)
    shown = re.findall(r"^<!-- ::: lightning_axosparse\.(\w+)\s", pages, re.MULTILINE)
    assert sorted(shown) == sorted(set(lightning_axosparse.__all__) - {"__version__"})
    assert all(getattr(lightning_axosparse, name).__doc__ for name in shown)
    strategy = lightning_axosparse.AxoSparseStrategy
    (members,) = re.findall(r"members: \[(.*)\]", pages)
    text = "\n".join(page.read_text() for page in PAGES)
    for method in re.findall(r"[. `]strategy\.(\w+)\(", text):
        assert method in members.split(", ")
        assert getattr(strategy, method).__doc__


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    strategy = (tmp_path / "api" / "strategy" / "index.html").read_text()
    assert "message-driven scheduling" in strategy  # from the docstring
    assert "g_inter" in strategy
