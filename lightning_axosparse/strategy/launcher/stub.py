"""The process that mpiexec starts as a rank: another process runs the call, and this one waits.

``python -I -S stub.py FOLDER ADDRESS COMMAND...`` imports only the standard library, so that it
starts at once. The process that runs the call is a fork of the server at the address; without a
server, it runs the command. It gets the signals of the stub, and ends with it; the stub ends with
its exit code. A guard, which mpiexec does not know, is the parent of the process, and notes in the
folder of the call how it has ended.
"""

import ctypes
import marshal
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PARENT_ENDS = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
_MOMENT = 0.2
"""Seconds. A process ends a moment after its files are closed, at which mpiexec kills its stub."""


def main(folder: str, address: str, *command: str) -> None:
    """Wait until another process has run the call of a folder, and end with its exit code."""
    signal.signal(_PARENT_ENDS, lambda *_: _end_with_mpiexec(folder))
    signal_when_parent_ends(_PARENT_ENDS)
    arguments = [folder, str(os.getpid()), str(os.getppid())]
    guard = _ask_server(address, arguments) or _start_guard([*command, *arguments], folder)
    if "PMI_FD" in os.environ:
        os.close(int(os.environ["PMI_FD"]))  # mpiexec sees it closed when the process has ended.
    process = _receive(guard)
    own_signals = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, _PARENT_ENDS}
    for number in signal.valid_signals() - own_signals:
        signal.signal(number, lambda number, _: os.kill(process, number))
    code = _receive(guard)
    os._exit(code if code >= 0 else 128 - code)


def signal_when_parent_ends(number: int) -> None:
    """Let Linux send this process a signal when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def user_of(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    sizes = struct.Struct("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, sizes.size)
    return int(sizes.unpack(peer)[1])


def _ask_server(address: str, arguments: list[str]) -> socket.socket | None:
    """Ask the server for a process; return the connection to its guard, if there is a server."""
    if not address:
        return None
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(b"\0" + address.encode())
    except OSError:
        return None
    if user_of(server) != os.getuid():
        return None
    os.umask(umask := os.umask(0))
    request = marshal.dumps(
        {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": umask,
            "cores": tuple(os.sched_getaffinity(0)),
        }
    )
    files = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    socket.send_fds(server, [struct.pack("q", len(request))], files)
    server.sendall(request)
    return server


def _start_guard(command: list[str], folder: str) -> socket.socket:
    """Start a guard that starts a command; return the connection to it."""
    ours, theirs = socket.socketpair()
    name = str(os.getpid())
    if os.fork() == 0:
        ours.close()
        os.setsid()
        process = os.posix_spawn(command[0], command, os.environ, setpgroup=0)
        if "PMI_FD" in os.environ:
            os.close(int(os.environ["PMI_FD"]))
        watch(process, theirs, folder, name)
    theirs.close()
    return ours


def watch(process: int, stub: socket.socket, folder: str, name: str) -> NoReturn:
    """Wait until a process ends: note how, and send its stub the exit code; end it with the stub.

    Args:
        process: its process ID.
        stub: the connection to the stub.
        folder: of the call.
        name: of the stub.
    """
    with suppress(OSError):  # The stub was killed.
        _send(stub, process)
    code = _wait(process, stub)
    if code is None:
        os.killpg(process, signal.SIGKILL)
        os._exit(1)
    if not any(os.path.exists(f"{folder}/{end}-{name}") for end in ("done", "failure")):
        _note_end(folder, name, code)
        code = code or 1  # With 0, mpiexec would let the other ranks wait for this one.
    with suppress(OSError):
        if code != 0:
            os.killpg(process, signal.SIGKILL)  # also the processes that it has started
    with suppress(OSError):
        _send(stub, code)
    os._exit(0)


def _wait(process: int, stub: socket.socket) -> int | None:
    """Return the exit code of a process, negative for a signal; None if its stub ends before."""
    wakeup, from_signal = os.pipe()
    os.set_blocking(from_signal, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(from_signal)
    stub_ended = False
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if stub_ended:
            return None
        ready, _, _ = select.select([stub.fileno(), wakeup], [], [])
        if stub.fileno() in ready:
            stub_ended = True
            select.select([wakeup], [], [], _MOMENT)
        else:
            os.read(wakeup, 64)


def _note_end(folder: str, name: str, code: int) -> None:
    """Append to a file in the folder of the call when and how a process has ended."""
    # It creates no file, as the caller may be about to remove the folder.
    with suppress(OSError), open(os.open(f"{folder}/ends", os.O_WRONLY | os.O_APPEND), "w") as file:
        file.write(f"{time.time()} {code} {name}\n")


def _end_with_mpiexec(folder: str) -> NoReturn:
    _note_end(folder, "mpiexec", -signal.SIGKILL)
    os._exit(1)


def _send(connection: socket.socket, number: int) -> None:
    connection.send(struct.pack("q", number))


def _receive(connection: socket.socket) -> int:
    data = connection.recv(8, socket.MSG_WAITALL)
    return int(struct.unpack("q", data)[0]) if len(data) == 8 else -signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
