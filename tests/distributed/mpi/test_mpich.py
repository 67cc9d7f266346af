"""Room in /dev/shm is looked at before MPI starts, and what killed jobs left there is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.mpi import mpich
from lightning_axosparse.distributed.mpi.environment import find_mpiexec
from lightning_axosparse.distributed.mpi.mpich import check_room, remove_leftovers

LAUNCHES = """
from tests.parity.cases import Net, fit, trainer
from lightning_axosparse import AxoSparseStrategy
fit(trainer(AxoSparseStrategy(g_inter=2), 2), Net())
"""
UNDER_MPIEXEC = """
from lightning_axosparse import AxoSparseStrategy
AxoSparseStrategy(g_inter=2)
"""


def with_shared_memory(size: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees a /dev/shm of its own; also what it has left there, as last line."""
    mount = f"mount -t tmpfs -o size={size} none /dev/shm || exit 77"
    script = f'{mount}; "$@"; code=$?; ls /dev/shm; exit $code'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"may not mount a small /dev/shm: {done.stderr.strip()}")
    return done


def test_ranks_are_not_started_where_they_would_be_killed() -> None:
    done = with_shared_memory("4m", sys.executable, "-c", LAUNCHES)
    assert done.returncode == 1
    message = "has 4.0 of 4.0 MiB free, and MPI needs 20.1 MiB to start 2 ranks"
    assert message in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_ranks_of_mpiexec_say_so_before_the_system_kills_them() -> None:
    mpiexec = [str(find_mpiexec()), "-n", "2", sys.executable, "-c", UNDER_MPIEXEC]
    done = with_shared_memory("1m", *mpiexec)
    assert done.returncode != 0
    assert "has 1.0 of 1.0 MiB free, and MPI needs 2.2 MiB to start 2 ranks" in done.stderr
    assert "Bus error" not in done.stdout + done.stderr
    assert "mpich" not in done.stdout
    assert with_shared_memory("32m", *mpiexec).returncode == 0


def test_segments_of_jobs_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpich, "_FOLDER", tmp_path)
    names = ("mpich_shm_old_0", "mpich_shm_new_0", "psm_old")
    for name in names:
        (tmp_path / name).touch()
        age = 0 if "new" in name else 3600
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    remove_leftovers()
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:]}
    with pytest.raises(
        MisconfigurationException, match=r"MiB free, and MPI needs .* 1000000 ranks"
    ):
        check_room(1_000_000)
