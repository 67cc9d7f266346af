"""Trains dense and pruned GPTs, and compares their perplexities.

    python -m benchmarks.perplexity rates report [--folder FOLDER]
    python -m benchmarks.perplexity --table

A job that was finished is a line of results.jsonl, and is not run again; one that was stopped goes
on where it was. Several of these processes share the jobs. Validation chooses, test reports.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.perplexity.plan import PHASES, jobs, tables
from benchmarks.perplexity.results import Results


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("phases", nargs="*", metavar="PHASE", help=" or ".join(PHASES))
    arguments.add_argument("--folder", type=Path, help="of text, for the tasks that need one")
    arguments.add_argument("--results", type=Path, default=Path(__file__).parent / "results.jsonl")
    arguments.add_argument(
        "--states",
        type=Path,
        default=Path(tempfile.gettempdir()) / "axosparse-perplexity",
        help="where states of training are kept, so that a job can go on",
    )
    arguments.add_argument("--seeds", type=int, nargs="+", help="run only the jobs of these seeds")
    arguments.add_argument("--table", action="store_true", help="print the tables")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # weights at their floor are in the line
    results = Results(options.results)
    if options.table:
        print(tables(results))
    for phase in options.phases:
        chosen = (job for job in jobs(phase) if job.seed in (options.seeds or [job.seed]))
        results.complete(chosen, options.states, options.folder)


if __name__ == "__main__":
    main()
