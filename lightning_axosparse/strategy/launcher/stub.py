"""What mpiexec starts as a rank: asks the fork server for the process that is one.

``python -I -S stub.py ADDRESS MODULE FOLDER``, with nothing but the standard library, so that it
starts at once. It ends as that process does, which ends with this one.
"""

import ctypes
import marshal
import os
import signal
import socket
import struct
import sys

_PR_SET_PDEATHSIG = 1


def main(address: str, module: str, *arguments: str) -> None:
    """Have ``module.main(*arguments, PARENT)`` run by a fork, and end as it does."""
    end_with_parent()
    server = socket.socket(socket.AF_UNIX)
    server.connect(b"\0" + address.encode())
    if user_of(server) != os.getuid() or not server.recv(1):
        sys.exit("The process that starts ranks has ended.")
    os.umask(umask := os.umask(0))
    request = marshal.dumps(
        {
            "module": module,
            "arguments": (*arguments, str(os.getppid())),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": umask,
            "cores": tuple(os.sched_getaffinity(0)),
        }
    )
    files = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    socket.send_fds(server, [struct.pack("q", len(request))], files)
    server.sendall(request)
    for file in files[3:]:
        os.close(file)
    process = _answer(server)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, lambda number, _: os.kill(process, number))
    code = _answer(server)
    if code >= 0:
        os._exit(code)
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def end_with_parent() -> None:
    """Let Linux kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    sizes = struct.Struct("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, sizes.size)
    return int(sizes.unpack(peer)[1])


def _answer(server: socket.socket) -> int:
    data = server.recv(8, socket.MSG_WAITALL)
    return int(struct.unpack("q", data)[0]) if len(data) == 8 else -signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
