"""Runs a function on real MPI ranks and returns the result of each rank."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle

from tests.accelerator import ACCELERATOR

REPOSITORY = Path(__file__).parents[1]
WARM_PYTHON = [sys.executable, "-S", "-E", str(REPOSITORY / "tests" / "warm" / "stub.py")]
"""What :func:`warm_python` returns."""

PATIENCE = 600
"""Seconds until a job counts as hanging; on a busy machine the longest take minutes."""


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list:
    """Call ``function(*args)`` on each of ``ranks`` fresh processes; the results in rank order."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    return run_job([str(mpiexec), "-n", str(ranks), *warm_python()], ranks, function, *args)


def run_command(command: list[Any], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository, with one thread a process."""
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_job(start: list[str], ranks: int, function: Callable[..., Any], *args: Any) -> list:
    """The same, where the command ``start`` starts the Python of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        try:
            job.write_bytes(cloudpickle.dumps((function, args)))
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[function.__module__])
        done = run_command([*start, "-m", "tests.ranks", str(job)], PATIENCE)
        if done.returncode:
            raise AssertionError(f"ranks failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        return [cloudpickle.loads(Path(f"{job}.{rank}").read_bytes()) for rank in range(ranks)]


@cache
def warm_python() -> list[str]:
    """A Python for ``-m MODULE`` or a file: a fork of a process that has done all imports.

    Even and odd ranks are forks of two processes, so that their sets have unlike orders, as those
    of ranks that are started anew. With CUDA it is a fresh Python: a fork cannot use what its
    parent has loaded.
    """
    if ACCELERATOR == "cuda":
        return [sys.executable]
    if "WARM_START" in os.environ:  # Of the process that started this worker of pytest-xdist.
        return WARM_PYTHON
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    addresses = [str(Path(folder) / f"warm{seed}") for seed in range(2)]
    servers = [_start_server(address, seed) for seed, address in enumerate(addresses)]
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
    os.environ["WARM_START"] = ":".join(addresses)
    return WARM_PYTHON


def _start_server(address: str, hash_seed: int) -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", address],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(hash_seed)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(server.kill)
    return server


def without_transformers() -> None:
    """Keep torchmetrics from importing transformers, which doubles the time a rank takes to start.

    Tests of models from transformers import it themselves.
    """
    from lightning_utilities.core.imports import RequirementCache

    check = RequirementCache._check_requirement

    def check_others(cache: RequirementCache) -> None:
        if str(cache.requirement).startswith("transformers"):
            cache.available, cache.message = False, "left out"
        else:
            check(cache)

    RequirementCache._check_requirement = check_others


def without_external_callbacks() -> None:
    """Keep Trainers from reading the metadata of all installed packages in search of callbacks."""
    from lightning.pytorch.trainer.connectors import callback_connector

    callback_connector._load_external_callbacks = lambda group: []


def _main(job: str) -> None:
    without_transformers()
    from mpi4py import MPI

    function, args = cloudpickle.loads(Path(job).read_bytes())
    try:
        result = function(*args)
        Path(f"{job}.{MPI.COMM_WORLD.rank}").write_bytes(cloudpickle.dumps(result))
        _close_process_groups()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def _close_process_groups() -> None:
    """Gloo aborts a process whose peers are gone while its threads still run."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1])
