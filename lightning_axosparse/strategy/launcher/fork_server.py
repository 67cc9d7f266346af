"""A process that has imported the modules that ranks need, and of which all ranks are forks.

A rank is a fork in which no call has run: it is as fresh as a new Python, but needs no seconds for
imports. Changes by a call (modules, settings, memory) end with it.

mpiexec starts a stub for each rank, which sends its environment and files to this server. The
server forks a guard for it, and the guard forks the rank, sends the stub its exit code, and kills
it if the stub is killed. Ranks do not need the server, which may end before them.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_axosparse.strategy.launcher import stub
from lightning_axosparse.strategy.launcher.mpiexec import environment

IDLE_SECONDS = 600.0
"""Seconds for which the server waits for the next call."""

COLD_COMMAND = (sys.executable, "-m")
"""The command of a rank without a server, before the module that it runs."""

_WORKER = "lightning_axosparse.strategy.launcher.worker"

# Variables that may differ between two calls, as no imported module reads them.
_IGNORED_VARIABLES = {
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTEST_CURRENT_TEST"),
    *("PYTHONPATH", "COLUMNS", "LINES"),
}

# Imports are faster without garbage collection. The function registered first is called last.
_CODE = """
import atexit, gc
gc.disable()
atexit.register(lambda: end())
from {module} import end, serve
serve({arguments})
"""

_server: ForkServer | None = None
_lock = threading.Lock()


def prepare() -> ForkServer | None:
    """Start the server, which imports modules while this process does something else.

    Returns:
        The server; None on other systems than Linux, and with CUDA, which a fork cannot use if its
        parent has loaded it.
    """
    global _server
    if not hasattr(os, "pidfd_open") or torch.cuda.is_available():
        return None
    with _lock:
        if _server is None or not _server.is_current():
            if _server is not None:
                _server.end()
            _server = ForkServer()
        return _server


def rank_command(folder: Path) -> list[str]:
    """Return the command that runs the call of a folder on a rank."""
    server = prepare()
    address = "" if server is None else server.address
    return [sys.executable, "-I", "-S", stub.__file__, str(folder), address, *COLD_COMMAND, _WORKER]


@atexit.register
def close_ranks() -> None:
    """End the process that waits for the next call of this one, to fork its ranks.

    It uses some hundred MB of memory, but no core. It ends by itself when no call has used it for
    ten minutes, and with this process. The next call then takes seconds to start.
    """
    global _server
    with _lock:
        if _server is not None:
            _server.end()
        _server = None


class ForkServer:
    """A handle of the server, in the process that has started it."""

    def __init__(self) -> None:
        self._caller, self._settings = os.getpid(), _settings()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(b"")  # The system chooses a name, which is not that of a file.
            listener.listen(socket.SOMAXCONN)
            self.address = listener.getsockname()[1:].decode()
            """The name of its socket; connections wait until it has started."""
            arguments = f"{listener.fileno()}, {self._caller}, {IDLE_SECONDS}"
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(module=__name__, arguments=arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(),
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def is_current(self) -> bool:
        """Whether the server runs with the settings that a new one would have."""
        same = (self._caller, self._settings) == (os.getpid(), _settings())
        return same and self.process.poll() is None

    def end(self) -> None:
        """End the server, unless another process, of which this one is a fork, has started it."""
        if self._caller == os.getpid():
            self.process.kill()
            self.process.wait()


def _settings() -> tuple[Any, ...]:
    """Return the settings that a process inherits: variables, limits, and ignoring Ctrl-C."""
    variables = {k: v for k, v in environment().items() if k not in _IGNORED_VARIABLES}
    ignores_ctrl_c = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as under ``nohup ... &``
    return variables, Path("/proc/self/limits").read_text(), ignores_ctrl_c


def serve(listening: int, caller: int, idle_seconds: float) -> None:
    """Fork ranks until the caller has ended, or has made no call for long."""
    importlib.import_module(_WORKER)
    os.chdir("/")
    gc.collect()
    gc.freeze()  # A fork would copy every page of these objects to collect garbage.
    gc.collect()  # Else the frozen objects count, and delay full collections in ranks.
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The server does not wait for guards.
    listener, caller_ends = socket.socket(fileno=listening), os.pidfd_open(caller)
    while True:
        ready, _, _ = select.select([listening, caller_ends], [], [], idle_seconds)
        if caller_ends in ready or not (ready or _has_children()):
            return
        if ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.close(caller_ends)
                _guard(connection)
            connection.close()


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _guard(connection: socket.socket) -> NoReturn:
    """Fork the rank for a stub, and watch it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if stub.user_of(connection) != os.getuid():
        os._exit(1)
    head, files, *_ = socket.recv_fds(connection, 8, 4)
    request = marshal.loads(connection.recv(struct.unpack("q", head)[0], socket.MSG_WAITALL))
    rank = os.fork()
    if rank == 0:
        connection.close()
        _run_rank(request, files)
    for file in files:
        os.close(file)
    with suppress(OSError):  # The rank may have done so itself.
        os.setpgid(rank, rank)
    call, name, _ = request["arguments"]
    stub.watch(rank, connection, call, name)


def _run_rank(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the worker in this fork, as a Python started by the stub would."""
    try:
        _inherit_from_stub(files, **request)
        sys.argv = [_WORKER, *request["arguments"]]
        importlib.import_module(_WORKER).main(*request["arguments"])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.exit()


def _inherit_from_stub(
    files: list[int],
    environment: dict[str, str],
    folder: str,
    umask: int,
    cores: tuple[int, ...],
    **_: Any,
) -> None:
    """Set the files, environment and other settings that a process started by the stub inherits."""
    os.setpgrp()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    for file in files[3:]:
        environment["PMI_FD"] = str(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.umask(umask)
    os.sched_setaffinity(0, cores)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    importlib.invalidate_caches()


def end() -> None:
    """End this process without freeing all objects, which would take a second of a core.

    All other steps of the interpreter at exit are done.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `os._exit`: MPICH signs off from mpiexec in a function that C calls at exit. `PyDLL` holds
    # the interpreter's lock meanwhile, so that daemon threads do not run.
    ctypes.PyDLL(None).exit(0)
