"""Ranks are fresh forks of one process, which does not outlive its use."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_axosparse import close_ranks
from lightning_axosparse.distributed.mpi.environment import placement
from lightning_axosparse.strategy.launcher import fork_server
from lightning_axosparse.strategy.launcher.failure import RankFailedError
from lightning_axosparse.strategy.launcher.launcher import MPILauncher

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks with CUDA are not forked")


@pytest.fixture(scope="module", autouse=True)
def _end_with_module() -> Iterator[None]:
    yield
    close_ranks()


def launch(function: Any, *args: Any) -> Any:
    return MPILauncher(SingleDeviceStrategy("cpu"), 2).launch(function, *args)


def server() -> psutil.Process:
    process = fork_server.prepare()
    assert process is not None
    return psutil.Process(process.process.pid)


def server_of_this_rank() -> int:
    """The process that has forked the guard that has forked this rank."""
    guard = psutil.Process().parent()
    assert guard is not None
    return guard.ppid()


def state_then_change(folder: Path) -> dict[str, Any]:
    """What a process has that a call may change; then change it all."""
    process = psutil.Process()
    module = importlib.import_module("mine")
    state = {
        "server": server_of_this_rank(),
        "state": {
            "threads": torch.get_num_threads(),
            "variable": os.environ.get("LEFT"),
            "path": sys.path[:],
            "folder": os.getcwd(),
            "filters": warnings.filters[:],
            "level": logging.getLogger("lightning.pytorch").level,
            "global": vars(torch).get("left"),
            "signal": signal.getsignal(signal.SIGUSR1),
        },
        "anomalies": torch.is_anomaly_enabled(),
        "module": module.version,
        "pid": process.pid,
        "mpi": placement().world_size,
    }
    torch.set_num_threads(3)
    torch.autograd.set_detect_anomaly(True)
    os.environ["LEFT"] = "by a call"
    sys.path.insert(0, "/left")
    os.chdir(folder)
    warnings.simplefilter("error")
    logging.getLogger("lightning.pytorch").setLevel(77)
    torch.left = "by a call"
    module.version = -1
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return state


def test_each_call_has_fresh_ranks_of_one_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("version = 1")
    first = launch(state_then_change, tmp_path)
    (tmp_path / "mine.py").write_text("version = 22")
    second = launch(state_then_change, tmp_path)
    torch.autograd.set_detect_anomaly(False)
    assert first["state"] == second["state"]
    assert first["state"]["folder"] == os.getcwd()
    assert (first["module"], second["module"]) == (1, 22)
    # A flag of torch comes back, as it would stay in one process.
    assert (first["anomalies"], second["anomalies"]) == (False, True)
    assert first["pid"] != second["pid"]
    assert first["server"] == second["server"] == server().pid
    assert first["mpi"] == second["mpi"] == 2


def test_what_a_notebook_defines_anew_is_new_on_the_ranks(monkeypatch):
    main = vars(sys.modules["__main__"])
    for answer in (1, 2):
        exec(f"class Mine:\n def tell(self): return type(self).answer\n answer = {answer}", main)
        try:
            assert launch(main["Mine"]().tell) == answer
        finally:
            del main["Mine"]


def die_or_fail(how: str) -> None:
    if placement().rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if placement().rank == 1:
        raise ValueError("mine")
    time.sleep(60)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [("die", RankFailedError, "rank 1 .* killed by SIGSEGV"), ("fail", ValueError, "mine")],
)
def test_a_failed_call_leaves_no_rank_to_the_next_one(how, error, words):
    before = server()
    with pytest.raises(error, match=words):
        launch(die_or_fail, how)
    assert launch(server_of_this_rank) == server().pid == before.pid
    deadline = time.monotonic() + 20
    while before.children():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_guard() -> None:
    if placement().rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_if_a_guard_is_killed_its_rank_ends():
    with pytest.raises(RankFailedError):
        launch(kill_guard)
    assert launch(server_of_this_rank) == server().pid


def kill_server() -> int:
    if placement().rank == 0:
        os.kill(server_of_this_rank(), signal.SIGKILL)
    return placement().world_size


def test_if_it_is_killed_ranks_go_on_and_the_next_call_has_another():
    before = server()
    assert launch(kill_server) == 2
    assert launch(server_of_this_rank) == server().pid != before.pid


def test_if_it_cannot_be_reached_ranks_start_without_it(monkeypatch):
    process = fork_server.prepare()
    monkeypatch.setattr(process, "address", "nobody listens")
    assert launch(state_of_start) == ["-m", fork_server._WORKER]


def state_of_start() -> list[str]:
    """How this process was started, without its Python and the arguments of the worker."""
    return psutil.Process().cmdline()[1:3]


def test_it_sleeps_between_calls():
    launch(os.getpid)
    while (process := server()).children():
        time.sleep(0.05)
    before = process.cpu_times()
    time.sleep(1)
    after = process.cpu_times()
    assert (after.user, after.system) == pytest.approx((before.user, before.system), abs=0.02)
    assert process.status() == psutil.STATUS_SLEEPING


def test_another_environment_needs_another_process(monkeypatch):
    process = fork_server.prepare()
    assert process is not None
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert process.is_current()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not process.is_current()


def test_ranks_do_not_ignore_ctrl_c_because_an_earlier_one_did():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = fork_server.prepare()
        assert process is not None
        assert process.is_current()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert not process.is_current()
    finally:
        signal.signal(signal.SIGINT, before)


def test_close_ranks_ends_it_and_the_next_call_has_another():
    before = server()
    close_ranks()
    assert not before.is_running()
    close_ranks()
    assert launch(server_of_this_rank) == server().pid != before.pid


def test_it_ends_when_it_was_not_used_for_long(monkeypatch):
    close_ranks()
    monkeypatch.setattr(fork_server, "IDLE_SECONDS", 0.5)
    process = fork_server.prepare()
    assert process is not None
    assert launch(sleep_then_is_server_alive)  # A call that takes longer is not idle.
    assert process.process.wait(60) == 0
    assert not process.is_current()
    close_ranks()


def sleep_then_is_server_alive() -> bool:
    time.sleep(2)
    return psutil.Process(server_of_this_rank()).status() == psutil.STATUS_SLEEPING


def start_and_sleep(line: Any) -> None:
    line.send(server().pid)
    time.sleep(60)


def test_it_ends_with_the_process_that_has_started_it():
    ours, theirs = multiprocessing.Pipe()
    caller = multiprocessing.get_context("fork").Process(target=start_and_sleep, args=[theirs])
    caller.start()
    process = psutil.Process(ours.recv())
    caller.kill()
    caller.join()
    process.wait(60)
