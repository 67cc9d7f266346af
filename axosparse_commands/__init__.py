"""The entry points of the commands, which check arguments before torch is imported.

Importing torch and Lightning takes seconds. ``lightning_axosparse.cli`` runs the commands.
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
    arguments.plan_options(arguments.plan_parser())
    from lightning_axosparse.cli.plan import main

    main()


def sweep() -> None:
    """Run ``axosparse-sweep``."""
    arguments.sweep_parser().parse_args()
    from lightning_axosparse.cli.sweep import main

    main()


def _check_overrides(command: str, config: str) -> None:
    given = sys.argv[1:]
    if given == ["--version"]:  # Hydra would print its own.
        print(command, version("lightning-axosparse"))
        sys.exit()
    problem = overrides.find_problem(config, given)
    if problem is not None:
        sys.exit(f"{command}: {problem}")
