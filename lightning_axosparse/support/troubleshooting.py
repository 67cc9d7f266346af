"""Parts of error messages: links to the documentation, shortened lists, missing packages."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PAGE = "docs/troubleshooting.md"
"""In the repository, and in an installed package."""

_CLI = {"hydra": "hydra-core", "matplotlib": "matplotlib", "rich": "rich"}


def see(entry: str) -> str:
    """Return the last sentence of a message: a link to an entry, such as ``see("masks")``."""
    return f" See {page()}#{entry}."


def first_few(names: list[str]) -> str:
    """Return names for a message: all, or "a, b, c, d, e, f, g, h and 3 more"."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def without_link(error: BaseException) -> str:
    """Return the message of an error without its link, as part of another message."""
    return re.sub(rf"\.( See {re.escape(page())}#[a-z-]+\.)?$", "", str(error))


@cache
def page() -> str:
    """Return the address of the troubleshooting page, if the metadata has one, else its file."""
    try:
        links = importlib.metadata.metadata("lightning-axosparse").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # used from a checkout that is not installed
        links = []
    for link in links:
        label, _, address = link.partition(",")
        if label.strip() == "Documentation":
            return f"{address.strip().rstrip('/')}/troubleshooting/"
    package = Path(__file__).parents[1]
    installed = package / PAGE
    return str(installed if installed.exists() else package.parent / PAGE)


def require_cli(user: str) -> None:
    """Check that the packages of the command line are installed."""
    missing = [package for module, package in _CLI.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{user} needs {', '.join(missing)}, of the extra `cli`: pip install "
            f"{' '.join(missing)}, or '.[cli]' in a checkout." + see("commands")
        )
