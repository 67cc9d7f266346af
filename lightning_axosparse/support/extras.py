"""Refuses what needs packages that are not installed, and names the extra that has them."""

from __future__ import annotations

from importlib.util import find_spec

from lightning_axosparse.support.troubleshooting import see

_CLI = {"hydra": "hydra-core", "matplotlib": "matplotlib", "rich": "rich"}


def require_cli(user: str) -> None:
    """Check that the packages of the command line are installed.

    Args:
        user: what needs them, as the message begins.

    Raises:
        ModuleNotFoundError: if one is missing.
    """
    missing = [package for module, package in _CLI.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{user} needs {', '.join(missing)}, of the extra `cli`: pip install "
            "'lightning-axosparse[cli]', or '.[cli]' in a checkout." + see("commands")
        )
