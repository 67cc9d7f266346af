"""From a wheel, outside the checkout: what README shows runs, with the wheel's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ranks import PATIENCE, REPOSITORY

SHOWN = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
FOLDERS = ("docs", "examples", "tests")
PAGE = "from lightning_axosparse.support import troubleshooting; print(troubleshooting.page())"


class Installed(NamedTuple):
    folder: Path
    """The tests and what they read, without the package."""
    python: Path
    """Of an environment that has the wheel, and all else of this one."""

    def run(self, *arguments: str, patience: float = PATIENCE) -> str:
        # Where this Python looks for packages, and where ranks are forked, the checkout may be.
        of_checkout = ("PYTHONPATH", "WARM_START")
        environment = {key: text for key, text in os.environ.items() if key not in of_checkout}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pip = [sys.executable, "-m", "pip", "--quiet"]
    built, environment, outside = map(tmp_path_factory.mktemp, ("built", "environment", "outside"))
    subprocess.run([*pip, "wheel", "--no-deps", "-w", built, REPOSITORY], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # A line with a folder: what else is installed is found, and not the checkout, because files
    # of this kind in that folder are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = built.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    for pattern in ("bin/mpiexec*", "bin/hydra_*", "lib/[!p]*"):  # MPI from PyPI
        for file in Path(sys.prefix).glob(pattern):
            (environment / pattern).parent.joinpath(file.name).symlink_to(file)
    for name in SHOWN:
        shutil.copy(REPOSITORY / name, outside)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, outside / name, ignore=ignored)
    return Installed(outside, python)


@pytest.mark.slow
def test_the_package_is_that_of_the_wheel(installed: Installed) -> None:
    file = installed.run("-c", "import lightning_axosparse; print(lightning_axosparse.__file__)")
    assert Path(file).is_relative_to(installed.python.parents[1])


@pytest.mark.slow
def test_messages_lead_to_a_page_in_the_wheel(installed: Installed) -> None:
    page = Path(installed.run("-c", PAGE).strip())
    assert page.is_relative_to(installed.python.parents[1])
    assert page.read_text() == (REPOSITORY / "docs" / "troubleshooting.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize(
    ("file", "some"),  # Only files and entry points differ from those of the checkout.
    [("readme", "README.md"), ("commands", "not package_runs or pruned.safetensors or smoke]")],
)
def test_what_is_shown_runs(file: str, some: str, installed: Installed) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-m", "", "-k", some, f"tests/test_{file}.py")
    printed = installed.run("-m", "pytest", *options, patience=2 * PATIENCE)
    assert " passed" in printed
