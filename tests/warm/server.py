"""The server: forks a process for each stub, in which the imports of ranks are already done."""

from __future__ import annotations

import array
import fcntl
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

_HIGH = 500  # above the numbers of files that come from stubs


def serve(address: str) -> None:
    """Start ranks until the process that started this one ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        stub, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _run_rank(stub)
        stub.close()


def _end_with_parent() -> None:
    os.read(0, 1)  # sys.stdin would be forked with its lock held
    os._exit(0)


def _run_rank(stub: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stub = socket.socket(fileno=_raised(stub.detach()))
    request = _receive(stub)
    line = stub.detach()  # stays open until the process has ended, all of it
    threading.Thread(target=_end_with_stub, args=[line], daemon=True).start()
    os.setpgrp()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    code = _run(request["argv"])
    os.write(line, bytes([code]))
    sys.exit(code)  # mpi4py finalizes MPI when the interpreter ends


def _run(argv: list[str]) -> int:
    """Run a module as ``python -m MODULE ARGUMENTS`` does; return the exit code."""
    _, module, *arguments = argv
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _receive(stub: socket.socket) -> dict[str, Any]:
    head, rights, *_ = stub.recvmsg(8, socket.CMSG_SPACE(16 * 4))
    body = b""
    while len(body) < int.from_bytes(head, "big"):
        body += stub.recv(1 << 16)
    request: dict[str, Any] = json.loads(body)
    received = array.array("i", rights[0][2][: len(request["files"]) * 4])
    raised = [_raised(file) for file in received]
    for file, number in zip(raised, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    return request


def _raised(file: int) -> int:
    high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(file)
    return high


def _end_with_stub(line: int) -> None:
    os.read(line, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    from tests.ranks import without_transformers

    without_transformers()
    import torchmetrics  # noqa: F401

    import lightning_axosparse.strategy.launcher.worker
    import lightning_axosparse.strategy.strategy  # noqa: F401

    serve(sys.argv[1])
