"""The server: forks a process for each stub, in which the imports of ranks are already done."""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
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
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    code = _run(request["argv"])
    os.write(line, bytes([code]))
    _end(code)


def _run(argv: list[str]) -> int:
    """Run ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS`` as Python does; return the exit code."""
    is_module = argv[0] == "-m"
    sys.argv = argv[is_module:]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but for freeing all objects, which takes a second of a core."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `os._exit`: MPICH takes leave of mpiexec in a function that C calls at exit. The lock of
    # Python that is held meanwhile keeps daemon threads from going on.
    ctypes.PyDLL(None).exit(code)
    raise AssertionError("a process has returned from exit")


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
    from tests.ranks import WARM_PYTHON, without_external_callbacks, without_transformers

    without_transformers()
    import torchmetrics  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.t5.modeling_t5  # noqa: F401

    import lightning_axosparse.strategy.launcher.worker
    import lightning_axosparse.strategy.strategy  # noqa: F401
    from lightning_axosparse.sparse.ops.products import load_loops
    from lightning_axosparse.strategy.launcher import fork_server

    with open(__file__) as file:  # One server compiles them, the others find them in the cache.
        fcntl.flock(file, fcntl.LOCK_EX)
        load_loops()
    without_external_callbacks()
    fork_server.prepare = lambda: None
    fork_server.COLD_COMMAND = (*WARM_PYTHON, "-m")
    gc.collect()
    gc.freeze()  # A fork would copy every page of these objects to collect garbage.
    serve(sys.argv[1])
