"""Gathers the results of a sweep: the command ``axosparse-sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lightning_axosparse.cli.sweep.gather import gather, summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="axosparse-sweep",
        description="Gather the results of a sweep in its folder: sweep.csv, sweep.md, pictures, "
        "and sweep.html, which stands alone. Jobs that failed are listed with their commands.",
    )
    says = f"%(prog)s {version('lightning-axosparse')}"
    parser.add_argument("--version", action="version", version=says)
    parser.add_argument("folder", type=Path, help="hydra.sweep.dir of axosparse-train -m")
    folder: Path = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"'{folder}' is not a folder")
    jobs = gather(folder)
    if not jobs:
        parser.exit(1, f"No job has begun in '{folder}'.\n")
    print(summary(folder, jobs))


if __name__ == "__main__":
    main()
