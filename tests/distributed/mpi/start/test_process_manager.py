"""A rank reaches the standard error of mpiexec also when mpiexec has ended."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_axosparse.distributed.mpi.start.process_manager import Mpiexec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc has the files of mpiexec")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize(("name", "said"), [("mpiexec.hydra", "last\nlost\n"), ("orted", "last\n")])
def test_a_rank_has_the_last_word(name: str, said: str, tmp_path: Path) -> None:
    shell = shutil.copy(shutil.which("sh") or "", tmp_path / name)
    # The proxy ends as it should: of one that is killed the shell would write a line of its own.
    with (tmp_path / "log").open("w") as log:
        start = subprocess.Popen(
            [shell, "-c", "exec 3<&0; cat <&3 >/dev/null & echo $!; wait; echo last >&2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert start.stdin is not None
    assert start.stdout is not None
    mpiexec = Mpiexec(proxy=int(start.stdout.readline()))
    mpiexec.say_last("lost\n")
    start.stdin.close()
    start.wait()
    wait_until(lambda: (tmp_path / "log").read_text().endswith(said))
    assert (tmp_path / "log").read_text() == said
