"""What README and docs name exists: files, folders, modules, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_axosparse

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_axosparse"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
API = sorted((REPOSITORY / "docs" / "api").glob("*.md"))
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()


def test_paths_of_the_architecture_exist() -> None:
    text = re.sub(r"```.*?```", "", ARCHITECTURE, flags=re.DOTALL)
    paths = re.findall(r"`([\w./]*(?:\.py|\.yaml|/))`", text)
    assert paths
    rooms = (PACKAGE / name for name in ("distributed", "strategy", "callbacks"))
    roots = [REPOSITORY, PACKAGE, *rooms]
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


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


def test_the_navigation_leads_to_every_page() -> None:
    docs = REPOSITORY / "docs"
    _, _, navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")
    reached = {docs / name for name in re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)}
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
