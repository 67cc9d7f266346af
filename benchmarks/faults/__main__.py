"""Jobs to which something happens at a random time: how they end, and what they leave.

python -m benchmarks.faults [--faults N] [--seed N] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.faults.job import BATCHES, EPOCHS, train
from lightning_axosparse.support.files import temporary_folder

RANKS = 2
PATIENCE = 120
"""Seconds after which a job counts as one that does not end."""

STARTS = ("python", "mpiexec")
"""Whether the call starts the ranks, or mpiexec does."""

MARK = "AXOSPARSE_FAULT"
"""The environment variable by which all processes of a job are found."""

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM")
FAULTS = (
    *(f"{name} of a rank" for name in SIGNALS),
    "exit 0 of a rank",
    "exit 3 of a rank",
    "exception of a rank",
    "SIGSTOP of a rank for 3 s",
    "SIGTERM of the starter",
    "SIGINT of the starter",
    "SIGKILL of the starter",
    "SIGKILL of the proxy",
)
WORDS = {
    "exit": "rank {rank} .*ended with exit code {code}",
    "exception": "rank {rank} .*ArithmeticError|[Ff]ailed on rank {rank} ",
    "SIGTERM": "received SIGTERM",
    "SIGINT": "KeyboardInterrupt|Interrupt",
    "proxy": "proxy .*was killed",
    "rank": "rank {rank} .*was killed by {signal}",
}
"""What says why a job ended, by a word of the fault; a killed starter can say nothing."""


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        start: one of ``STARTS``.
        fault: what happened to it.
        code: its exit code; None if it did not end.
        seconds: from the fault to the end of its last process.
        named: whether its output says what happened, and to which rank; None where no one can.
        leftovers: what it left: processes, files in shared memory, temporary and partial files.
        remaining: what of it the next run has not removed.
        resumed: whether its checkpoint led to the weights of an undisturbed job, to the bit.
    """

    start: str
    fault: str
    code: int | None
    seconds: float
    named: bool | None
    leftovers: list[str]
    remaining: list[str]
    resumed: bool


def disturb(start: str, fault: str, chance: random.Random, expected: dict[str, Any]) -> Outcome:
    """Run a job, let something happen to it, and resume it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rank, step = chance.randrange(RANKS), chance.randrange(BATCHES, BATCHES * EPOCHS - 1)
        inside = fault.removesuffix(" of a rank") if fault.startswith("ex") else ""
        command = [sys.executable, "-m", "benchmarks.faults.job", name]
        command += [inside, str(rank), str(step)] if inside else []
        if start == "mpiexec":
            mpiexec = Path(sys.executable).parent / "mpiexec"
            command = [str(mpiexec), "-n", str(RANKS), *command]
        (folder / "tmp").mkdir()
        before = {*os.listdir("/dev/shm")}
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                command,
                env={**os.environ, MARK: name, "TMPDIR": f"{name}/tmp", "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            wait_until(lambda: (folder / "last.ckpt").exists() or job.poll() is not None, 600)
            if inside:
                wait_until(lambda: (folder / "fault").exists() or job.poll() is not None, 600)
            else:
                time.sleep(chance.uniform(0, 0.05 * BATCHES * (EPOCHS - 3)))
            began = time.monotonic()
            if not inside:
                inflict(fault, job, folder, rank)
            ended = wait_until(lambda: not processes_of(name), PATIENCE)
            seconds = time.monotonic() - began
        time.sleep(1)  # The files of a process are closed after it is last seen.
        code = job.wait() if ended or job.poll() is not None else None
        left = leftovers(folder, before)
        for process in processes_of(name):
            process.kill()
        said = (folder / "output").read_text()
        found = resumed(folder, expected)
        remaining = leftovers(folder, before)
        return Outcome(
            start, fault, code, round(seconds, 1), named(fault, rank, said), left, remaining, found
        )


def leftovers(folder: Path, before: set[str]) -> list[str]:
    """What a job has left behind.

    Args:
        folder: of the job.
        before: the files of shared memory that there were before it.
    """

    processes = [process.name() for process in processes_of(str(folder))]
    shared = sorted({*os.listdir("/dev/shm")} - before)
    unused = [name for name in shared if not is_mapped(f"/dev/shm/{name}")]
    partials = [path.name for path in folder.glob("*.partial")]
    return [*processes, *unused, *os.listdir(folder / "tmp"), *partials]


def is_mapped(path: str) -> bool:
    """Whether a living process uses a file of shared memory, such as one of another job."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text():
                return True
        except OSError:  # The process has ended.
            continue
    return not Path(path).exists()


def inflict(fault: str, job: subprocess.Popen[bytes], folder: Path, rank: int) -> None:
    """Let it happen."""
    signum = signal.Signals[fault.split()[0]]
    process = int((folder / f"rank-{rank}").read_text())
    if "starter" in fault:
        process = job.pid
    elif "proxy" in fault:
        parent = psutil.Process(process).parent()
        assert parent is not None
        assert parent.name() == "hydra_pmi_proxy"
        process = parent.pid
    os.kill(process, signum)
    if signum == signal.SIGSTOP:
        time.sleep(3)
        os.kill(process, signal.SIGCONT)


def named(fault: str, rank: int, said: str) -> bool | None:
    """Whether the output says what happened; None where there is no one to say it."""
    if "SIGSTOP" in fault or fault == "SIGKILL of the starter":
        return None
    words = next(words for key, words in WORDS.items() if key in fault)
    first, second, *_ = fault.split()
    return bool(re.search(words.format(rank=rank, signal=first, code=second), said))


def resumed(folder: Path, expected: dict[str, Any]) -> bool:
    """Whether the last checkpoint of a job leads to the weights that are expected, to the bit."""
    last = folder / "last.ckpt"
    if not last.exists():
        return False
    tempfile.tempdir = str(folder / "tmp")
    with temporary_folder():  # as a call that starts ranks
        train(folder, 1, resume=last, transport="loopback")
    tempfile.tempdir = None
    return equal(torch.load(last, weights_only=False), expected)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two checkpoints have the same weights, at the same step."""
    weights, others = one["state_dict"], other["state_dict"]
    alike = all(torch.equal(weights[name], others[name]) for name in others)
    return alike and one["global_step"] == other["global_step"] == BATCHES * EPOCHS


def processes_of(mark: str) -> list[psutil.Process]:
    """The living processes of a job."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(holds: Any, seconds: float) -> bool:
    """Wait for at most so long; whether it holds then."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(holds())


def table(outcomes: list[Outcome]) -> str:
    """A line for each fault and way of starting."""
    lines = [
        "| fault | started by | jobs | exit codes | seconds: median, most | named | left anything: "
        "at its end, after the next run | resumed to the bit |",
        "| --- | --- | --: | --- | --: | --: | --: | --: |",
    ]
    order = sorted(outcomes, key=lambda each: (FAULTS.index(each.fault), each.start))
    for (fault, start), group in groupby(order, key=lambda each: (each.fault, each.start)):
        jobs = list(group)
        codes = ", ".join(map(str, sorted({job.code for job in jobs}, key=str)))
        seconds = [job.seconds for job in jobs]
        said = "-" if jobs[0].named is None else str(sum(bool(job.named) for job in jobs))
        lines.append(
            f"| {fault} | `{start}` | {len(jobs)} | {codes} | {median(seconds):.1f}, "
            f"{max(seconds):.1f} | {said} | {sum(bool(job.leftovers) for job in jobs)}, "
            f"{sum(bool(job.remaining) for job in jobs)} | "
            f"{sum(job.resumed for job in jobs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Add what became of each job to a file, and print the table of all that are in it."""
    parser = argparse.ArgumentParser(description="Let jobs fail at random times.")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("faults.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have it ignored.
    chance = random.Random(options.seed)
    undisturbed = Path(tempfile.mkdtemp())
    train(undisturbed, 1, transport="loopback")
    expected = torch.load(undisturbed / "last.ckpt", weights_only=False)
    shutil.rmtree(undisturbed)
    kinds = list(product(STARTS, FAULTS))
    chosen = kinds * (options.faults // len(kinds)) + chance.sample(
        kinds, options.faults % len(kinds)
    )
    chance.shuffle(chosen)
    for start, fault in chosen:
        outcome = disturb(start, fault, chance, expected)
        with options.results.open("a") as results:
            print(json.dumps(asdict(outcome)), file=results, flush=True)
    lines = options.results.read_text().splitlines()
    print(table([Outcome(**json.loads(line)) for line in lines]))


if __name__ == "__main__":
    main()
