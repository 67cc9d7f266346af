"""Starts ranks by mpiexec, shows their output, and stops them."""

from __future__ import annotations

import codecs
import io
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from lightning_axosparse.distributed.mpi.environment import find_mpiexec
from lightning_axosparse.distributed.rank_status import read_status

# Prefixes of variables that a launcher sets for its ranks; the new ranks must not see them.
_RANK_VARIABLES = (
    "PMI_",
    "PMIX_",
    "PALS_",
    "HYDI_",
    "MPI_LOCAL",
    "MV2_COMM_WORLD_",
    "JSM_NAMESPACE_",
    "OMPI_COMM_WORLD_",
    "OMPI_WORLD_",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_NUM_APP_CTX",
    "OMPI_FILE_LOCATION",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "OMPI_MCA_num_procs",
    "OMPI_MCA_initial_wdir",
    "PRTE_LAUNCHED",
    "SLURM_",
)
# Idle threads of torch would spin, on cores that other ranks and sparse products use.
_IDLE_THREADS = {"OMP_WAIT_POLICY": "passive"}
# Open MPI 5 and 4 start more ranks than cores only with these variables. Like MPICH, they then do
# not bind a rank and its data loader workers to a core.
_OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
# All ranks are on this host, so UCX and libfabric listen on the loopback device only.
_LOOPBACK = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"} if sys.platform == "linux" else {}
_GRACE_SECONDS = 5  # for mpiexec to end the ranks
_POLL_SECONDS = 0.05


class Output:
    """An output stream of this process to which ranks write.

    If it has a file, they write to that. If not, as in a notebook or where it is captured, they
    write to a pipe, which this process copies to the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self.target = _file_number(stream)
        """The file number to which mpiexec writes, or ``subprocess.PIPE``."""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Write data from the pipe; no bytes mean its end."""
        self._stream.write(self._decoder.decode(data, final=not data))
        self._stream.flush()


def start(ranks: int, command: Sequence[str], outputs: Sequence[Output]) -> subprocess.Popen[bytes]:
    """Start ``command`` on a number of ranks of this node."""
    stdout, stderr = outputs
    return subprocess.Popen(
        [str(find_mpiexec()), "-n", str(ranks), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout.target,
        stderr=stderr.target,
        env=environment(),
        start_new_session=True,  # Ctrl-C reaches this process only, which sends it to the ranks.
    )


def wait(process: subprocess.Popen[bytes], outputs: Sequence[Output], folder: Path) -> int:
    """Wait until mpiexec has ended; stop it if it outlives a rank.

    Returns:
        The exit code of mpiexec, or 0 if it was stopped.
    """
    deadline = float("inf")
    for _ in _copied_output(process, outputs):
        if deadline == float("inf") and (folder / "ends").stat().st_size:
            deadline = time.monotonic() + _GRACE_SECONDS
        if time.monotonic() > deadline:
            stop(process, outputs, signal.SIGTERM, folder)
            return 0
    return process.returncode


def stop(
    process: subprocess.Popen[bytes], outputs: Sequence[Output], signum: int, folder: Path
) -> None:
    """Send a signal to mpiexec, which sends it to the ranks; kill it if it does not end.

    Ranks that have agreed to end and are saving a checkpoint get the time that they need.
    """
    process.send_signal(signum)
    deadline = time.monotonic() + _GRACE_SECONDS
    for _ in _copied_output(process, outputs):
        if time.monotonic() > deadline:
            deadline = time.monotonic() + _GRACE_SECONDS
            if not any(read_status(str(file)).leaves for file in folder.glob("status-*")):
                process.kill()


def _copied_output(process: subprocess.Popen[bytes], outputs: Sequence[Output]) -> Iterator[None]:
    """Copy the output of ranks from pipes until mpiexec has ended; yield several times a second."""
    with selectors.DefaultSelector() as selector:
        for pipe, output in zip((process.stdout, process.stderr), outputs, strict=True):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, output)
        while True:
            ready = selector.select(_POLL_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                key.data.write(data)
                if not data:
                    selector.unregister(key.fileobj)
            if not ready and process.poll() is not None:
                return
            yield


def environment() -> dict[str, str]:
    """Return the environment variables of the ranks."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    variables = _OPEN_MPI | _IDLE_THREADS | _LOOPBACK | inherited
    variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if sys.stdout.isatty() and _file_number(sys.stdout) != subprocess.PIPE:
        # The ranks write to a pipe of mpiexec, and cannot see that a terminal shows their output.
        columns, lines = shutil.get_terminal_size()
        terminal = {
            "TTY_COMPATIBLE": "1",
            "TTY_INTERACTIVE": "1",
            "COLUMNS": str(columns),
            "LINES": str(lines),
        }
        variables = terminal | variables
    return variables


def _file_number(stream: TextIO) -> int:
    if isinstance(stream, io.TextIOWrapper):
        try:
            return stream.fileno()
        except OSError:
            pass
    return subprocess.PIPE
