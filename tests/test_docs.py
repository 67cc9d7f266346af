"""What README and docs name exists: files, folders, modules, links."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lightning_axosparse
from lightning_axosparse.cli.sweep import CURVES
from tests.parity import test_containers, test_families, test_transformers

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_axosparse"
SUBPACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
API = sorted((REPOSITORY / "docs" / "api").glob("*.md"))
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()
LISTING = ARCHITECTURE.partition("## Subpackages")[2].partition("\n## ")[0]
README = PAGES[0].read_text()


def inline_code(text: str) -> list[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


PATHS, NAMES = (
    sorted({code for code in inline_code(ARCHITECTURE) if fits(code)})
    for fits in (
        lambda code: re.fullmatch(r"[\w./]*(\.py|\.yaml|/)", code),
        lambda code: (
            re.fullmatch(r"\w+(\.\w+)+", code)
            and code.split(".")[0] in SUBPACKAGES
            and not code.endswith(".py")
        ),
    )
)


def folders(table: str) -> set[str]:
    """The folders that the first column of a table names."""
    cells = re.findall(r"^\| ([^|]*)\|", table, re.MULTILINE)
    return {code.strip("/") for cell in cells for code in inline_code(cell)}


def test_paths_exist() -> None:
    rooms = (PACKAGE / name for name in ("distributed", "strategy", "callbacks"))
    roots = [REPOSITORY, PACKAGE, *rooms]
    assert {"pipeline/engine.py", "support/"} <= set(PATHS)
    assert [path for path in PATHS if not any((root / path).exists() for root in roots)] == []


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


def test_names_can_be_imported() -> None:
    assert "pipeline.schedule.SCHEDULES" in NAMES
    for name in NAMES:
        parts = name.split(".")
        found: object = lightning_axosparse
        for number, part in enumerate(parts, start=1):
            if not hasattr(found, part):
                import_module(".".join(["lightning_axosparse", *parts[:number]]))
            found = getattr(found, part)


def test_every_subpackage_is_listed() -> None:
    assert folders(LISTING) == SUBPACKAGES


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


def test_a_page_shows_no_directive_of_the_site_where_it_is_read_in_the_repository() -> None:
    for page in [*PAGES, *API]:
        visible = re.sub(r"<!--.*?-->|```.*?```", "", page.read_text(), flags=re.DOTALL)
        assert not re.search(r"^\s*(:::|--8<--|!!!|\?\?\?)", visible, re.MULTILINE), page


def test_files_that_a_page_shows_are_those_of_the_examples() -> None:
    shown = [
        block
        for page in PAGES
        for block in re.findall(r"<!-- (\S+) -->\n```\w*\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert len(shown) >= 3
    for path, code in shown:
        assert code == (REPOSITORY / path).read_text(), path


def test_every_benchmark_has_a_page() -> None:
    folders = {path.parent.name for path in (REPOSITORY / "benchmarks").glob("*/README.md")}
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert set(re.findall(r" benchmarks/(\w+)\.md$", navigation, re.MULTILINE)) == folders


def test_every_notebook_has_a_page() -> None:
    names = {path.stem for path in (REPOSITORY / "notebooks").glob("*.ipynb")}
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert set(re.findall(r" notebooks/(\w+)\.md$", navigation, re.MULTILINE)) == names


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


def test_the_networks_that_are_said_to_run_are_those_that_tests_train() -> None:
    page = (REPOSITORY / "docs" / "will-my-module-run.md").read_text()
    row = r"^\| [^|]+ \| (`[^|]+`)(: found)? \| `(\w+)\.py`: ([^|]+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    listed = {
        (file, network): None if found else inline_code(paths)
        for paths, found, file, network in rows
    }
    tested = (
        {
            ("test_transformers", name): options.get("pipeline")
            for name, (_, options) in test_transformers.ROWS.items()
        }
        | {
            ("test_containers", name): options.get("pipeline")
            for name, (_, options) in test_containers.NETWORKS.items()
        }
        | {
            ("test_families", name): options.get("pipeline")
            for name, (_, _, options) in test_families.ROWS.items()
        }
    )
    assert listed.keys() == tested.keys()
    for network, pipeline in tested.items():
        ends = listed[network]
        assert (ends is None) == (pipeline is None)
        if ends is not None:
            paths = [pipeline] if isinstance(pipeline, str) else pipeline
            assert len(paths) == len(ends)
            assert all(path.endswith(f".{end}") for path, end in zip(paths, ends, strict=True))


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
