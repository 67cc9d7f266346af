"""Slurm: the documented script, tasks that srun did not connect, lost ranks, signals."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.debian import install
from tests.parity.cases import Net, fit, loader, trainer
from tests.ranks import PATIENCE, REPOSITORY

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
KillWait=30
SchedulerParameters=sched_interval=1,batch_sched_delay=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=ALL Default=YES
"""
TRAIN = """
import os, signal, sys
import lightning as L
import torch
from tests.ranks import without_transformers
without_transformers()
from lightning_axosparse import AxoSparseStrategy
from tests.debian import install
from tests.parity.cases import Net, fit, trainer

class Doomed(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if os.environ.get("DOOMED") == str(self.trainer.global_rank) and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)

L.seed_everything(0, verbose=False)
run = trainer(AxoSparseStrategy(g_inter=2, microbatches=2), 2)
record = fit(run, Doomed())
if run.is_global_zero:
    torch.save(record.losses, "losses")
"""

PREEMPTED = """
import os, time
from pathlib import Path
import lightning as L
from lightning.pytorch.plugins.environments import SLURMEnvironment
from tests.ranks import without_transformers
without_transformers()
from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, loader, trainer

class Slow(Net):
    def on_train_batch_start(self, batch, batch_idx):
        time.sleep(float(os.environ["STEP_SECONDS"]))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero:
            with open("losses", "a") as file:
                print(self.trainer.global_step, float(outputs["loss"]).hex(), file=file)

L.seed_everything(0, verbose=False)
requeues = SLURMEnvironment(auto_requeue=True)
strategy = AxoSparseStrategy(g_inter=2, microbatches=2, cluster_environment=requeues)
run = trainer(strategy, 2, max_epochs=24, default_root_dir=os.getcwd())
# With one batch an epoch, each begins where an undisturbed run has the same samples.
run.fit(Slow(), loader(1, batches=1))
Path("done").touch()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user of a Slurm with one node, this one."""
    if missing(programs()):
        install("slurm-wlm", "munge")
    found = programs()
    if absent := missing(found):
        pytest.skip(f"no {', '.join(absent)}: Debian has them in slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    environment = configure(folder)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    munged = [f"--{option}={folder}/munge.{end}" for option, end in places.items()]
    commands = ["munged", "-F", "--force", f"--log-file={folder}/munge.log", *munged]
    with ExitStack() as running, (folder / "daemons.log").open("wb") as log:
        for command in (commands, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemon = subprocess.Popen(
                [str(found[command[0]]), *command[1:]], env=environment, stdout=log, stderr=log
            )
            running.callback(stop, daemon)
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)
        if not wait_until(lambda: "ok" in srun(environment, "-n", "1", "echo", "ok").stdout):
            pytest.skip(f"Slurm may not run here: {(folder / 'daemons.log').read_text()[-2000:]}")
        yield environment


def programs() -> dict[str, str | None]:
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    return {name: shutil.which(name, path=path) for name in (*DAEMONS, "srun", "sbatch")}


def missing(found: dict[str, str | None]) -> list[str]:
    return [name for name, program in found.items() if program is None]


def configure(folder: Path) -> dict[str, str]:
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    with closing(socket.socket()) as one, closing(socket.socket()) as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in (one, other)]
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    text = CONFIGURATION.format(host=host, user=user, ports=ports, folder=folder)
    (folder / "slurm.conf").write_text(text)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PMI"))}
    return {
        **kept,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }


def stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def wait_until(holds: Any, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(held)


def srun(environment: dict[str, str], *arguments: str, **options: Any) -> Any:
    return subprocess.run(
        ["srun", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=options.pop("timeout", PATIENCE),
        check=False,
        **options,
    )


def queue(environment: dict[str, str]) -> bytes:
    """The jobs that wait or run, one a line."""
    return subprocess.check_output(["squeue", "--noheader"], env=environment)


def documented_script() -> str:
    """The batch script of the docs, for as many nodes and tasks as there are here."""
    script = (REPOSITORY / "examples" / "cluster" / "job.sh").read_text()  # docs/clusters.md has it
    script = re.sub(r"--nodes=\d+", "--nodes=1", script)
    return re.sub(r"--ntasks-per-node=\d+", "--ntasks-per-node=2", script)


def test_the_documented_script_trains_like_one_process(slurm, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.sh").write_text(documented_script())
    submit = ["sbatch", "--output=out", "job.sh"]  # Its --wait looks every 32 seconds.
    subprocess.run(submit, cwd=tmp_path, env=slurm, check=True)
    assert wait_until(lambda: not queue(slurm), PATIENCE)
    assert (tmp_path / "losses").exists(), (tmp_path / "out").read_text()
    L.seed_everything(0, verbose=False)
    expected = fit(trainer(), Net()).losses
    assert torch.load(tmp_path / "losses") == pytest.approx(expected, abs=5e-7)


def test_tasks_that_srun_did_not_connect_are_no_ranks(slurm, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = srun(slurm, "-n", "2", "python", "train.py", cwd=tmp_path)
    assert done.returncode != 0
    refusal = "MisconfigurationException: srun started 2 tasks, but MPI connects 1 of them"
    assert done.stderr.count(refusal) == 2
    assert not (tmp_path / "losses").exists()


def test_a_killed_rank_ends_the_others(slurm, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["--mpi=pmi2", "-K", "-n", "2", "python", "train.py"]
    done = srun({**slurm, "DOOMED": "1"}, *command, cwd=tmp_path)
    assert done.returncode != 0
    assert "task 1: Killed" in done.stderr
    assert not (tmp_path / "losses").exists()
    assert wait_until(lambda: not queue(slurm))


def submit(slurm: dict[str, str], folder: Path, step_seconds: float) -> str:
    """Submit the documented script with a slow training, wait for its first step; the job's ID."""
    (folder / "train.py").write_text(PREEMPTED)
    (folder / "job.sh").write_text(documented_script())
    command = ["sbatch", "--parsable", "--requeue", "--open-mode=append", "--output=out", "job.sh"]
    environment = {**slurm, "STEP_SECONDS": str(step_seconds)}
    job = subprocess.check_output(command, cwd=folder, env=environment, text=True).strip()
    assert wait_until(lambda: losses(folder), PATIENCE), (folder / "out").read_text()
    return job


def losses(folder: Path) -> list[tuple[int, float]]:
    """The steps of a job, in the order in which it took them, and their losses."""
    if not (folder / "losses").exists():
        return []
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return [(int(step), float.fromhex(loss)) for step, loss in lines]


def test_a_job_whose_end_slurm_announces_goes_on_where_it_was(slurm, tmp_path):
    job = submit(slurm, tmp_path, 0.3)
    subprocess.run(["scancel", "--signal=USR1", job], env=slurm, check=True)
    assert wait_until(lambda: not queue(slurm), PATIENCE), queue(slurm)
    output = (tmp_path / "out").read_text()
    assert (tmp_path / "done").exists(), output
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"]
    assert f"Restored all states from the checkpoint at {tmp_path}/hpc_ckpt_1.ckpt" in output
    L.seed_everything(0, verbose=False)
    run = trainer(max_epochs=24)
    run.fit(Net(), loader(1, batches=1))
    expected = dict(enumerate(run.callbacks[0].record.losses, 1))
    found = losses(tmp_path)
    again = len(found) - (24 - saved)  # It may take more steps before Slurm ends it.
    assert [step for step, _ in found] == [*range(1, again + 1), *range(saved + 1, 25)]
    for step, loss in found:
        assert loss == pytest.approx(expected[step], abs=5e-7)
    assert dict(found) == dict(found[::-1])  # What was repeated is the same to the bit.


def test_a_cancelled_job_ends_in_seconds(slurm, tmp_path):
    job = submit(slurm, tmp_path, 10)
    subprocess.run(["scancel", job], env=slurm, check=True)
    cancelled = time.monotonic()
    assert wait_until(lambda: not queue(slurm), PATIENCE)
    # As a rule it takes three; Slurm kills after 30.
    assert time.monotonic() - cancelled < 20
    assert "received SIGTERM" in (tmp_path / "out").read_text()


def test_a_job_of_a_sweep_is_a_job_of_slurm(slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "text.txt").write_text("Shall I compare thee to a summer's day? " * 200)
    small = f"experiment=smoke debug=fdr data.path={tmp_path / 'text.txt'} model.depth=1"
    sweep = "-m hydra/launcher=slurm hydra.sweep.dir=sweep hydra.launcher.timeout_min=5"
    done = subprocess.run(
        [sys.executable, "-m", "lightning_axosparse.cli.train", *f"{sweep} {small}".split()],
        cwd=tmp_path,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 jobs have finished" in (tmp_path / "sweep" / "sweep.html").read_text()
    logs = list((tmp_path / "sweep" / ".submitit").rglob("*_log.out"))
    assert len(logs) == 1
