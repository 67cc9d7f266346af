"""Trains dense and pruned GPTs, and compares their perplexities.

    python -m benchmarks.perplexity show [--tasks MAIN SMALL] [--english FOLDER]
    python -m benchmarks.perplexity --table --plot settling.png

A job that was finished is a line of results.jsonl, and is not run again: a run that was stopped
goes on where it was. Validation chooses, test reports.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from benchmarks.perplexity.plan import PHASES, SETTLING, jobs, tables
from benchmarks.perplexity.plots import plot_settling
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.tasks import TASKS


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "phases", nargs="*", metavar="PHASE", help=" or ".join([*PHASES, "settle"])
    )
    arguments.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    arguments.add_argument("--english", type=Path, help="folder with two files of English text")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="draw how masks settle")
    arguments.add_argument("--results", type=Path, default=Path(__file__).parent / "results.jsonl")
    arguments.add_argument("--table", action="store_true", help="print the tables")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    results = Results(options.results)
    if options.table:
        print(tables(results))
    if options.plot:
        plot_settling(results, SETTLING, options.plot)
    for phase in options.phases:
        results.complete((j for j in jobs(phase) if j.task.name in options.tasks), options.english)


if __name__ == "__main__":
    main()
