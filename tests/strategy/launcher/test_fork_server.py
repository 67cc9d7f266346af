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
from lightning_axosparse.strategy.launcher.launcher import MPILauncher, RankFailedError

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
    return psutil.Process(process._process.pid)


def state_then_change(folder: Path) -> dict[str, Any]:
    """What a process has that a call may change; then change it all."""
    process = psutil.Process()
    module = importlib.import_module("mine")
    state = {
        "parent": process.ppid(),
        "state": {
            "threads": torch.get_num_threads(),
            "anomalies": torch.is_anomaly_enabled(),
            "variable": os.environ.get("LEFT"),
            "path": sys.path[:],
            "folder": os.getcwd(),
            "filters": warnings.filters[:],
            "level": logging.getLogger("lightning.pytorch").level,
            "global": vars(torch).get("left"),
            "signal": signal.getsignal(signal.SIGUSR1),
        },
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
    assert first["state"] == second["state"]
    assert first["state"]["folder"] == os.getcwd()
    assert (first["module"], second["module"]) == (1, 22)
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] == server().pid
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


@pytest.mark.parametrize(("how", "words"), [("die", "killed by SIGSEGV"), ("fail", "mine")])
def test_a_failed_call_leaves_no_rank_to_the_next_one(how, words):
    before = server()
    with pytest.raises(RankFailedError, match=words):
        launch(die_or_fail, how)
    assert launch(os.getppid) == server().pid == before.pid
    deadline = time.monotonic() + 20
    while before.children():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_parent() -> None:
    if placement().rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_if_it_is_killed_its_ranks_end_and_the_next_call_has_another():
    before = server()
    with pytest.raises(RankFailedError, match="killed by SIGKILL"):
        launch(kill_parent)
    assert launch(os.getppid) == server().pid != before.pid


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
    assert process.fits()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not process.fits()


def test_close_ranks_ends_it_and_the_next_call_has_another():
    before = server()
    close_ranks()
    assert not before.is_running()
    close_ranks()
    assert launch(os.getppid) == server().pid != before.pid


def test_it_ends_when_it_was_not_used_for_long(monkeypatch):
    close_ranks()
    monkeypatch.setattr(fork_server, "IDLE_SECONDS", 0.5)
    process = fork_server.prepare()
    assert process is not None
    with process.connect() as connection:
        connection.settimeout(2)
        with pytest.raises(TimeoutError):  # A call that takes longer is not idle.
            connection.recv(1)
    assert process._process.wait(60) == 0
    assert not process.fits()
    assert process.connect() is None
    close_ranks()


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
