"""Keeps a process that has imported what ranks need, and forks the ranks of all calls from it.

A rank is a fork that has run nothing yet: it is as fresh as a new Python, and starts without the
seconds of imports. What a call leaves in it (modules, settings, memory) ends with it.

mpiexec starts a stub for each rank, which sends its environment and files to this server. The
server forks, and is the parent of the rank: the rank gets the signals of the stub, the stub ends
as the rank does, and if the stub is killed, so is the rank.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import marshal
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from lightning_axosparse.strategy.launcher import stub
from lightning_axosparse.strategy.launcher.mpiexec import environment

IDLE_SECONDS = 600.0
"""How long the process waits for the next call."""

COLD = (sys.executable, "-m")
"""The command of a rank without a server, before the module that it runs."""

# What may be unlike in two calls without being read by any imported module.
_OF_ONE_CALL = {
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTEST_CURRENT_TEST"),
    *("PYTHONPATH", "COLUMNS", "LINES"),
}

# Without collecting garbage, imports take less time. What is registered first is called last.
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
    """Let a server import what ranks need, while this process does something else.

    There is none with CUDA, which a fork cannot use if its parent has loaded it, and on other
    systems than Linux.
    """
    global _server
    if not hasattr(os, "pidfd_open") or torch.cuda.is_available():
        return None
    with _lock:
        if _server is None or not _server.fits():
            _let_go()
            _server = ForkServer()
        return _server


@contextmanager
def rank_command() -> Iterator[tuple[str, ...]]:
    """The command that runs a module on a rank, inside the context."""
    server = prepare()
    connection = None if server is None else server.connect()
    if server is None or connection is None:
        yield COLD
        return
    with connection:
        yield server.command


@atexit.register
def close_ranks() -> None:
    """End the process that is kept for the ranks of this process's next call, if there is one.

    It takes some hundred MB of memory and no time of a core. It ends by itself when no call has
    used it for ten minutes, and with this process. The call after that takes seconds to start.
    """
    with _lock:
        ended = _let_go()
    if ended is not None:
        ended.join()


def _let_go() -> threading.Thread | None:
    global _server
    ended = None if _server is None else _server.close()
    _server = None
    return ended


class ForkServer:
    """A process that forks ranks, as the process that has started it sees it."""

    def __init__(self) -> None:
        self._settings = _settings()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(b"")  # The system finds a name, which is no file.
            listener.listen(socket.SOMAXCONN)
            self._address = listener.getsockname()
            arguments = f"{listener.fileno()}, {os.getpid()}, {IDLE_SECONDS}"
            code = _CODE.format(module=__name__, arguments=arguments)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(),
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        name = self._address[1:].decode()
        self.command = (sys.executable, "-I", "-S", stub.__file__, name)

    def fits(self) -> bool:
        """Whether it runs, with the settings that a new one would have."""
        return self._settings == _settings() and self._process.poll() is None

    def connect(self) -> socket.socket | None:
        """Wait until it is ready; it does not end before the connection is closed."""
        connection = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            connection.connect(self._address)
            if connection.recv(1):
                return connection
        connection.close()
        return None

    def close(self) -> threading.Thread:
        """Let it end as soon as no call uses it; the returned thread waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        waiting = threading.Thread(target=self._process.wait, daemon=True)
        waiting.start()
        return waiting


def _settings() -> tuple[Any, ...]:
    """What a process has from its start on."""
    variables = {k: v for k, v in environment().items() if k not in _OF_ONE_CALL}
    return os.getpid(), variables, Path("/proc/self/limits").read_text()


def serve(listener: int, caller: int, idle_seconds: float) -> None:
    """Fork ranks until the caller ends, lets go of the server, or has not used it for long."""
    importlib.import_module("lightning_axosparse.strategy.launcher.worker")
    os.chdir("/")
    gc.collect()
    gc.freeze()  # A fork would copy every page of these objects to collect garbage.
    gc.enable()
    _Server(socket.socket(fileno=listener), caller).run(idle_seconds)


@dataclass
class _Rank:
    """A process that is a rank, its file for waiting, and how it has ended; None if it runs."""

    pid: int
    file: int
    code: int | None = None


class _Server:
    """The loop of the server: it waits for connections, their ends and the ends of ranks."""

    def __init__(self, listener: socket.socket, caller: int) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._ranks = dict[socket.socket, _Rank | None]()  # None: the connection of a call
        self._ended: list[int] = []
        self._leaves = False
        self._on_event(listener, self._accept)
        for file in (sys.stdin.fileno(), os.pidfd_open(caller)):
            self._on_event(file, partial(self._leave, file))

    def run(self, idle_seconds: float) -> None:
        """Answer until there is nothing to do."""
        while self._ranks or not self._leaves:
            events = self._selector.select(None if self._ranks else idle_seconds)
            if not events:
                return
            key, _ = events[0]  # The others may be of files that it closes.
            key.data()

    def _on_event(self, file: Any, act: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _leave(self, file: int) -> None:
        self._selector.unregister(file)
        self._leaves = True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if stub.user_of(connection) != os.getuid():
            connection.close()
            return
        self._ranks[connection] = None
        self._on_event(connection, partial(self._read, connection))
        with suppress(OSError):
            connection.send(b".")

    def _read(self, connection: socket.socket) -> None:
        request = _receive(connection)
        if request is None:
            self._disconnect(connection)
            return
        pid = os.fork()
        if pid == 0:
            self._run_rank(request)
        for file in request["files"]:
            os.close(file)
        with suppress(OSError):  # It may have done so itself.
            os.setpgid(pid, pid)
        self._ranks[connection] = rank = _Rank(pid, os.pidfd_open(pid))
        self._on_event(rank.file, partial(self._report_end, connection, rank))
        _send(connection, pid)

    def _run_rank(self, request: dict[str, Any]) -> NoReturn:
        """Run ``main`` of a module in this fork, as a Python that the stub starts would do."""
        try:
            for key in self._selector.get_map().values():
                if isinstance(key.fileobj, int):
                    os.close(key.fd)
                else:
                    cast(socket.socket, key.fileobj).close()
            self._selector.close()
            _take_place_of_stub(**request)
            sys.argv = [request["module"], *request["arguments"]]
            importlib.import_module(request["module"]).main(*request["arguments"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.exit()

    def _report_end(self, connection: socket.socket, rank: _Rank) -> None:
        """Tell the stub how its rank has ended."""
        self._selector.unregister(rank.file)
        end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        rank.code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        _send(connection, rank.code)

    def _disconnect(self, connection: socket.socket) -> None:
        """Forget a call, or a stub and its rank, which ends with it."""
        self._selector.unregister(connection)
        connection.close()
        if rank := self._ranks.pop(connection):
            if rank.code is None:
                self._selector.unregister(rank.file)
            if rank.code != 0:
                os.killpg(rank.pid, signal.SIGKILL)  # and what it has started
            os.close(rank.file)
            self._ended.append(rank.pid)
        if None not in self._ranks.values():  # Until then the launcher looks at how ranks ended.
            while self._ended:
                os.waitpid(self._ended.pop(), 0)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """What a stub asks for; None if it, or a call, has ended."""
    with suppress(OSError):
        head, files, *_ = socket.recv_fds(connection, 8, 4)
        if len(head) == 8:
            size = struct.unpack("q", head)[0]
            body = connection.recv(size, socket.MSG_WAITALL)
            if len(body) == size:
                return {**marshal.loads(body), "files": files}
    return None


def _send(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # The stub was killed.
        connection.send(struct.pack("q", number))


def _take_place_of_stub(
    environment: dict[str, str],
    folder: str,
    umask: int,
    cores: tuple[int, ...],
    files: list[int],
    **_: Any,
) -> None:
    """Set what a process inherits to what the stub has inherited."""
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
    """End this process, without freeing all objects, which would take a second of a core.

    Everything else that the interpreter does at exit is done.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `os._exit`: MPICH takes leave of mpiexec in a function that C calls at exit. The lock of
    # Python that is held meanwhile keeps daemon threads from going on.
    ctypes.PyDLL(None).exit(0)
