"""Opens a page in a headless Chromium and returns what it made of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.debian import install

NAMES = ("chromium", "chromium-browser", "google-chrome")


@cache
def chromium() -> str | None:
    """The program; where tests may install Debian packages, it is installed."""
    if not any(map(shutil.which, NAMES)):
        install("chromium")
    return next(filter(None, map(shutil.which, NAMES)), None)


def opened(page: Path, folder: Path) -> tuple[str, list[str]]:
    """Open a page; the document after its scripts have run, and what the console has.

    Args:
        page: the file.
        folder: for the browser's own files.
    """
    program = chromium()
    if program is None:
        pytest.skip(f"no {', '.join(NAMES)}: Debian has it in the package chromium")
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom"
    logs = "--enable-logging=stderr --virtual-time-budget=1000 --window-size=1200,900"
    done = subprocess.run(
        [program, *options.split(), *logs.split(), f"--user-data-dir={folder}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
