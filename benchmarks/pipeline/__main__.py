"""Runs the benchmarks of schedules and transports, one job after the other.

    python -m benchmarks.pipeline [--quick]

The machine should have nothing else to do. Prints Markdown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import NamedTuple


class Job(NamedTuple):
    title: str
    ranks: int
    command: str
    trials: int


JOBS = [
    Job("Sleeping stages against static 1F1B", 4, "schedules", 7),
    Job("Blocks against torch's 1F1B over gloo", 2, "peers", 15),
    Job("The same with larger messages", 2, "peers --samples 4", 15),
    Job("The same on more ranks than cores", 4, "peers", 15),
    Job("Blocks against axonn", 2, "axonn_peer blocks", 15),
    Job("Sleeping stages against axonn", 4, "axonn_peer sleep", 15),
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="3 trials of each")
    quick = arguments.parse_args().quick
    failed, missed = [], 0
    for job in JOBS:
        module, *options = job.command.split()
        trials = str(3 if quick else job.trials)
        start = ["mpiexec", "-n", str(job.ranks), sys.executable, "-m"]
        script = [f"benchmarks.pipeline.{module}", *options, "--trials", trials]
        print(f"\n### {job.title}\n\n    mpiexec -n {job.ranks} python -m {' '.join(script)}\n")
        with subprocess.Popen(start + script, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                missed += line.count("**no**")
        if process.returncode:
            failed.append(job.title)
    print(f"\n{missed} bars not reached.")
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
