"""Two hosts whose names do not resolve, and a link between them that is cut.

A host is a network namespace, with process numbers, a ``/proc`` and a name of its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, loader, trainer, whole_state
from tests.ranks import run_command, run_job


class Hosts:
    """Two hosts, connected by one link.

    Args:
        folder: for the script that stands in for ssh.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"axo{os.getpid()}{letter}" for letter in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def create(self) -> None:
        """Raise CalledProcessError where that is not permitted."""
        one, other = self.names
        for name in self.names:
            self._ip("netns", "add", name)
        self._ip(
            *f"link add eth0 netns {one} type veth peer name eth0 netns {other}".split(),
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")
        subprocess.run([*self._on(other), "true"], check=True, capture_output=True, text=True)
        while not all(self._is_up(name) for name in self.names):
            time.sleep(0.01)  # MPI takes a link that comes up late for none.

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def cut(self) -> None:
        self._ip("-n", self.names[0], "link", "set", "eth0", "down")

    def start(self, ranks_a_host: int) -> list[str]:
        """The command that starts Python on as many ranks of each host, from the first."""
        ssh = self.folder / "ssh"
        ssh.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'  # its options, and then the host
            f'shift; exec {shlex.join(self._on(self.names[1]))} sh -c "$*"\n'
        )
        ssh.chmod(0o755)
        return [
            *self._on(self.names[0]),
            str(Path(sys.executable).parent / "mpiexec"),
            *f"-localhost {self.addresses[0]} -launcher ssh -launcher-exec {ssh}".split(),
            "-hosts",
            ",".join(f"{address}:{ranks_a_host}" for address in self.addresses),
            *f"-n {2 * ranks_a_host} {sys.executable}".split(),
        ]

    def _on(self, name: str) -> list[str]:
        private = "unshare --uts --ipc --pid --fork --kill-child --mount-proc"
        named = ["sh", "-c", f'hostname {name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", name, *private.split(), *named]

    def _is_up(self, name: str) -> bool:
        return "state UP" in self._ip("-n", name, "link", "show", "eth0")

    def _ip(self, *arguments: str) -> str:
        command = ["ip", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    missing = [program for program in ("ip", "unshare") if not shutil.which(program)]
    if missing:
        pytest.skip(f"no program {' and '.join(missing)} to make network namespaces")
    pair = Hosts(tmp_path)
    try:
        pair.create()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr}")
    else:
        yield pair
    finally:
        pair.remove()


def train(hosts: int, ranks_a_host: int, g_inter: int) -> tuple[Record, dict[str, Any]]:
    from lightning_axosparse.distributed.mpi.environment import placement

    here, listened = placement(), listening()
    replicas = hosts * ranks_a_host // g_inter
    L.seed_everything(0, verbose=False)
    strategy = AxoSparseStrategy(g_inter=g_inter, microbatches=2)
    run = trainer(strategy, ranks_a_host, num_nodes=hosts, use_distributed_sampler=False)
    # Together the replicas see the batches that one process has.
    data = loader(1).dataset
    share = DistributedSampler(data, replicas, here.rank // g_inter, shuffle=False)
    run.fit(Net(), DataLoader(data, 16 // replicas, sampler=share))
    record: Record = run.callbacks[0].record
    record.weights = whole_state(run, run.lightning_module)
    return record, {
        "host": socket.gethostname(),
        "resolves": resolves(socket.gethostname()),
        "place": (here.rank, here.node_rank, here.local_rank, here.nodes),
        "listens": {connection.laddr.ip for connection in listening() - listened},
    }


def listening() -> set[Any]:
    """Where this process listens: MPI does, too."""
    connections = psutil.Process().net_connections("inet")
    return {connection for connection in connections if connection.status == "LISTEN"}


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except socket.gaierror:
        return False


@pytest.mark.parametrize("ranks_a_host", [1, 2])
def test_hosts_whose_names_do_not_resolve_train_like_one_process(hosts, ranks_a_host):
    alone, _ = train(1, 1, 1)
    results = run_job(hosts.start(ranks_a_host), 2 * ranks_a_host, train, 2, ranks_a_host, 2)
    for rank, (record, facts) in enumerate(results):
        host, local = divmod(rank, ranks_a_host)
        assert facts == {
            "host": hosts.names[host],
            "resolves": False,
            "place": (rank, host, local, 2),
            "listens": set(),
        }
        assert record.weights.keys() == alone.weights.keys()
        for name, weight in alone.weights.items():
            assert torch.allclose(record.weights[name], weight, rtol=0, atol=2e-6), name
    losses = [
        sum(losses) / len(results) for losses in zip(*(r.losses for r, _ in results), strict=True)
    ]
    assert losses == pytest.approx(alone.losses, abs=1e-6)


class Tell(Callback):
    """Says in a file that training is under way."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.file.touch()


def train_and_end_mpi() -> None:
    from mpi4py import MPI

    trainer(AxoSparseStrategy(2, 2), 1, num_nodes=2, max_epochs=1).fit(Net(), loader(1))
    MPI.Finalize()
    time.sleep(3)  # The watchdog looks once a second.
    print(f"{socket.gethostname()} has ended")


def test_a_script_may_end_mpi_itself(hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import tests.faults.test_hosts as t; t.train_and_end_mpi()")
    done = run_command([*hosts.start(1), script], 60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()[::3]) == hosts.names


def train_until_the_link_is_cut(folder: Path) -> None:
    strategy = AxoSparseStrategy(g_inter=2, microbatches=2, timeout=10)
    run = trainer(
        strategy, 1, num_nodes=2, max_epochs=-1, callbacks=[Tell(folder / socket.gethostname())]
    )
    run.fit(Net(), loader(1))


def test_a_job_whose_link_is_cut_ends_and_says_what_it_waited_for(hosts, tmp_path):
    def cut_once_under_way() -> None:
        while not all((tmp_path / name).exists() for name in hosts.names):
            if over.wait(0.05):
                return
        hosts.cut()

    over = threading.Event()
    knife = threading.Thread(target=cut_once_under_way)
    knife.start()
    try:
        with pytest.raises(AssertionError, match="ranks failed") as failure:
            run_job(hosts.start(1), 2, train_until_the_link_is_cut, tmp_path)
    finally:
        over.set()
        knife.join()
    assert all((tmp_path / name).exists() for name in hosts.names)
    message = str(failure.value)
    assert "timeout=10 s" in message
    assert f"rank 1 on host {hosts.names[1]}" in message
