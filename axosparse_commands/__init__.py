"""The commands up to where they need torch and Lightning, whose imports take seconds.

Wrong arguments are answered before these are imported; ``lightning_axosparse.cli`` does the rest.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from axosparse_commands import arguments, overrides


def train() -> None:
    """Run ``axosparse-train``."""
    _check_overrides("axosparse-train", "config")
    from lightning_axosparse.cli.train import main

    main()


def evaluate() -> None:
    """Run ``axosparse-eval``."""
    _check_overrides("axosparse-eval", "eval")
    from lightning_axosparse.cli.evaluate import main

    main()


def plan() -> None:
    """Run ``axosparse-plan``."""
    arguments.plan().parse_args()
    from lightning_axosparse.cli.plan import main

    main()


def sweep() -> None:
    """Run ``axosparse-sweep``."""
    arguments.sweep().parse_args()
    from lightning_axosparse.cli.sweep import main

    main()


def _check_overrides(command: str, config: str) -> None:
    given = sys.argv[1:]
    if given == ["--version"]:  # Hydra would say its own.
        print(command, version("lightning-axosparse"))
        sys.exit()
    problem = overrides.problem(config, given)
    if problem is not None:
        sys.exit(f"{command}: {problem}")
