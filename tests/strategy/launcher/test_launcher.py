"""A Trainer's call on ranks of its own has the effects of one in the caller, and leaves nothing."""

from __future__ import annotations

import multiprocessing
import operator
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.mpi.environment import placement
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.strategy.launcher import fork_server
from lightning_axosparse.strategy.launcher.failure import RankFailedError
from lightning_axosparse.strategy.launcher.launcher import MPILauncher
from tests.parity.cases import Net
from tests.parity.cases import fit as fit_net
from tests.parity.cases import trainer as net_trainer
from tests.ranks import PATIENCE


class Ranks(SingleDeviceStrategy):
    """Every rank trains alone; rank 0 is the main one. With 0 ranks: in this process."""

    def __init__(self, ranks: int) -> None:
        super().__init__("cpu")
        self.ranks = ranks

    def _configure_launcher(self) -> None:
        if self.ranks:
            self._launcher = MPILauncher(self, self.ranks)

    def setup_environment(self) -> None:
        size = placement().world_size
        this_rank().set_grid(Grid(size, size, placement().rank))
        super().setup_environment()

    @property
    def is_global_zero(self) -> bool:
        return placement().rank == 0

    def keep_sharded(self) -> None:
        pass

    def release_shard(self) -> Iterator[tuple[str, Tensor]]:
        module = self.lightning_module
        if self.is_global_zero and module is not None:
            yield from chain(module.named_parameters(), module.named_buffers())


class Model(BoringModel):
    """Changes of every kind that training may make to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()), persistent=False)
        self.lazy = nn.LazyLinear(2)
        self.decayed = [self.layer.weight]
        self.losses: list[float] = []
        self.untouched = object()
        self.ranks: set[int] = set()

    def setup(self, stage: str) -> None:
        self.lazy(torch.ones(1, 2, dtype=self.dtype))
        self.example_input_array, self.strict_loading = torch.ones(1, 32), False

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = (
            super().training_step(batch, index)["loss"] + self.late(self.lazy(batch[:, :2])).sum()
        )
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        self.batches += 1
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("score", float(self.trainer.global_step))

    def on_train_end(self) -> None:
        self.layer.bias.requires_grad_(False)
        self.decay = [2 * weight.detach().sum() for weight in self.decayed]
        self.ranks.add(placement().world_size)
        random.random(), np.random.rand()

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch)


class OneWay:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return operator.truediv, (1, 0)


class Watch(Callback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen
        self.trainer: Any = None
        self.unpicklable: Any = None
        self.one_way: Any = None
        self.kept: Any = "as it was"

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(trainer.global_step)
        self.trainer, self.module, self.weight = trainer, module, module.layer.weight
        self.unpicklable, self.one_way = threading.Lock(), OneWay()


class Data(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.stages = [*getattr(self, "stages", []), stage]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 8), batch_size=2)

    val_dataloader = predict_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return 2 * batch


def session(ranks: int, folder: Path) -> dict[str, Any]:
    """A user's day: fit, predict, fit on; and all that they may look at afterwards."""
    seed_everything(7)
    model, data, seen = Model(), Data(), []
    weight, losses, watch = model.layer.weight, model.losses, Watch(seen)
    best = ModelCheckpoint(monitor="score", mode="max")
    trainer = Trainer(
        strategy=Ranks(ranks),
        accelerator="auto",
        max_epochs=2,
        callbacks=[watch, best],
        precision="64-true",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    assert model.layer.weight is weight is model.decayed[0] is watch.weight
    assert model.losses is losses
    assert watch.seen is seen
    assert watch.trainer is model.trainer is data.trainer is trainer
    assert watch.module is trainer.lightning_module is trainer.model is model
    assert trainer.datamodule is data
    assert type(model.lazy) is nn.Linear
    after = {
        "state": (trainer.state.status, trainer.state.fn, trainer.should_stop),
        "progress": (trainer.global_step, trainer.current_epoch),
        "metrics": {k: v.item() for k, v in trainer.callback_metrics.items()},
        "logged": sorted(trainer.logged_metrics),
        "bar": sorted(trainer.progress_bar_metrics),
        "best": (Path(best.best_model_path).name, best.best_model_score.item()),
        "folder": Path(trainer.log_dir).name,
        "stages": list(data.stages),
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "decay": [value.item() for value in model.decay],
        "losses": list(losses),
        "seen": list(seen),
        "batches": model.batches.item(),
        "kept": watch.kept,
        "properties": (model.dtype, model.strict_loading, model.example_input_array.tolist()),
        "moved": model._apply_batch_transfer_handler(torch.ones(1)).tolist(),
    }
    assert Path(best.best_model_path).exists()
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    random_states = (random.random(), np.random.rand(), torch.rand(1).item())
    predictions = trainer.predict(model, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data)
    return {
        **after,
        "ranks": model.ranks,
        "random": random_states,
        "predictions": torch.cat(predictions).tolist(),
        "progress after": (trainer.global_step, trainer.current_epoch, len(seen)),
        "weights": {k: v.tolist() for k, v in model.state_dict().items()},
        "random after": torch.rand(1).item(),
    }


def test_a_call_has_the_effects_of_one_in_this_process(tmp_path):
    here = session(0, tmp_path / "here")
    lost = r"unpicklable \(lock\), trainer.callbacks\[0\].one_way \(OneWay\) on the rank"
    with pytest.warns(UserWarning, match=lost):
        there = session(2, tmp_path / "there")
    assert (here.pop("ranks"), there.pop("ranks")) == ({1}, {2})
    assert there.keys() == here.keys()
    for name, value in here.items():
        assert there[name] == value, name
    assert here["progress"] == (8, 2)


class Broken(Exception):
    """Takes other arguments than it has as an exception, as many classes do."""

    def __init__(self, code: int, reason: str, *, advice: str) -> None:
        super().__init__(f"{reason} {code}\n{advice}")
        self.code = code


class Breaking(BoringModel):
    def on_train_start(self) -> None:
        from mpi4py import MPI

        print(f"rank {placement().rank} prints")
        MPI.COMM_WORLD.Barrier()
        if placement().rank == 1:
            raise Broken(42, "broken", advice="mend it")
        MPI.COMM_WORLD.Barrier()


def test_a_rank_that_raises(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = Trainer(strategy=Ranks(2), accelerator="auto", logger=False, barebones=True)
    with pytest.raises(Broken) as error:
        trainer.fit(Breaking())
    assert str(error.value) == "broken 42\nmend it"
    assert error.value.code == 42
    assert error.value.__cause__ is None
    (note,) = error.value.__notes__
    assert note.startswith("On rank 1 (stage 0 of replica 0):\n")
    assert note.count("  File ") == 1  # Lightning's frames and this package's are in the file.
    assert "in on_train_start\n    raise Broken(" in note
    (file,) = tmp_path.iterdir()
    assert note.endswith(f"\nAll frames are in '{file}'.")
    assert "in _run_stage" in file.read_text()
    captured = capsys.readouterr().out  # a stream without a file
    assert "rank 0 prints" in captured
    assert "rank 1 prints" in captured


class Reports(Callback):
    """Does what callbacks of Optuna do."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        import optuna  # it takes a second, and few workers run this test

        raise optuna.TrialPruned("worse than the median")


def test_a_callback_on_ranks_prunes_a_trial_of_optuna():
    import optuna

    def objective(trial: Any) -> None:
        strategy = AxoSparseStrategy(g_inter=2)
        fit_net(net_trainer(strategy, devices=2, callbacks=[Reports()]), Net())

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    assert study.trials[0].state == optuna.trial.TrialState.PRUNED


@pytest.mark.parametrize("fails", ["publish", "_report"])
def test_a_rank_that_cannot_begin_or_report(fails, monkeypatch):
    script = (
        "import sys\n"
        "from lightning_axosparse.strategy.launcher import worker\n"
        "class Full(OSError): ...\n"
        "def full(*_): raise Full('no space left')\n"
        f"if worker.world_communicator().rank == 1: worker.publish = worker.{fails} = full\n"
        "worker.main(*sys.argv[2:])"
    )
    monkeypatch.setattr(fork_server, "prepare", lambda: None)
    monkeypatch.setattr(fork_server, "COLD_COMMAND", (sys.executable, "-c", script))
    error, words = {
        "publish": (OSError, "^no space left\nOn rank 1:\n"),
        "_report": (RankFailedError, "ended with exit code 1"),
    }[fails]
    with pytest.raises(error, match=words):
        MPILauncher(Ranks(2), 2).launch(time.sleep, 60)


def listening() -> set[str]:
    """The addresses at which rank 0 can be reached."""
    placement()  # starts MPI
    connections = psutil.Process().net_connections("inet")
    return {each.laddr.ip for each in connections if each.status == "LISTEN"}


def test_other_hosts_cannot_connect_to_ranks():
    assert MPILauncher(Ranks(2), 2).launch(listening) <= {"127.0.0.1"}


def sleep(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"rank-{placement().rank}").write_text(str(child.pid))
    time.sleep(60)


def launch_sleepers(folder: Path, ranks: int) -> None:
    # A shell has commands that it runs in the background ignore Ctrl-C, and a Trainer that a test
    # left in the middle of a call has a handler of its own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tempfile.tempdir = str(folder / "tmp")
    try:
        MPILauncher(Ranks(ranks), ranks).launch(sleep, folder)
    except KeyboardInterrupt:
        os._exit(77)


@pytest.mark.parametrize(
    ("signum", "exitcode", "ranks"),
    [
        (signal.SIGINT, 77, 1),
        (signal.SIGTERM, -signal.SIGTERM, 1),
        (signal.SIGKILL, -signal.SIGKILL, 2),
    ],
)
def test_nothing_survives_the_caller(signum, exitcode, ranks, tmp_path, capfd):
    (tmp_path / "tmp").mkdir()
    fork = multiprocessing.get_context("fork")  # This process has imported everything already.
    caller = fork.Process(target=launch_sleepers, args=[tmp_path, ranks])
    caller.start()
    while len(list(tmp_path.glob("rank-*"))) < ranks:
        assert caller.is_alive()
        time.sleep(0.05)
    family = psutil.Process(caller.pid).children(recursive=True)
    assert len(family) > 2 * ranks  # the ranks, a child of each, and mpiexec
    os.kill(caller.pid, signum)
    caller.join(20)
    assert caller.exitcode == exitcode
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert list((tmp_path / "tmp").iterdir()) == []
    said = "This process received SIGTERM" in capfd.readouterr().err
    assert said == (signum == signal.SIGTERM)


class Waits(BoringModel):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_start(self) -> None:
        (self.folder / f"waits-{placement().rank}").touch()
        time.sleep(60)


class SavesSlowly(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if placement().world_size > 1:
            time.sleep(6)  # longer than ranks have that do not save
            (self.folder / f"saved-{placement().rank}").touch()


def test_after_ctrl_c_ranks_save_and_the_next_call_can_be_interrupted(tmp_path):
    def press_ctrl_c() -> None:
        while len(list(tmp_path.glob("waits-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=press_ctrl_c).start()
        trainer = Trainer(
            strategy=Ranks(2),
            accelerator="auto",
            logger=False,
            enable_checkpointing=False,
            callbacks=[SavesSlowly(tmp_path)],
        )
        with pytest.raises(SystemExit):
            trainer.fit(Waits(tmp_path))
        assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


SCRIPT = '''
import pickle
import sys
from pathlib import Path
import torch
import torch._dynamo
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch import Trainer
from tests.strategy.launcher.test_launcher import Ranks

where = "caller"

def say_where():
    return where

class Mine(BoringModel):
    def on_train_start(self):
        global where
        print("a rank of", type(self).__name__)
        assert globals() is vars(sys.modules["__main__"])  # torch.compile looks names up there.
        where, self.say_where = "rank", say_where
        torch.backends.cudnn.benchmark = True
        with torch.backends.mkldnn.flags(enabled=False):
            torch._dynamo.config.suppress_errors = not torch.backends.quantized.engine
        self.made_on_a_rank = pickle.loads(pickle.dumps(Part()))
        assert pickle.loads(pickle.dumps(main)) is main
        with Path("parts").open("rb") as file:  # as in a checkpoint
            assert isinstance(pickle.load(file), Part)

class Part:
    pass

def main():
    """Named as a function of the module that runs a rank."""

Mine.main = staticmethod(main)
with Path("parts").open("wb") as file:
    pickle.dump(Part(), file)

class Stop(Exception):
    def __init__(self, step, reason):
        super().__init__(f"{reason} at step {step}")
        self.step = step

def stop(self):
    raise Stop(3, "enough")

model = Mine()
Trainer(strategy=Ranks(RANKS), accelerator="auto", barebones=True, max_steps=2).fit(model)
print("returned", type(model.made_on_a_rank) is Part, model.say_where(), "and", where)
model.on_train_end = stop.__get__(model)
try:
    Trainer(strategy=Ranks(RANKS), accelerator="auto", barebones=True, max_steps=2).fit(model)
except Stop as stopped:
    print("stopped at step", stopped.step)
'''


@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_from_a_script_without_a_file(how, tmp_path):
    script = SCRIPT.replace("RANKS", "1")
    arguments = ["-c", script] if how == "-c" else ["-"]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=script if how == "stdin" else None,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a rank of Mine\nreturned True rank and caller\na rank of Mine\n")
    assert done.stdout.endswith("stopped at step 3\n")


def test_from_a_notebook(tmp_path):
    import nbformat  # it takes a second, and few workers run this test
    from nbclient import NotebookClient

    parts = SCRIPT.replace("RANKS", "2").split("\n\n")
    cells = [nbformat.v4.new_code_cell(part) for part in parts]
    notebook = nbformat.v4.new_notebook(cells=cells)
    path = os.pathsep.join(path for path in sys.path if path)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=PATIENCE, resources=resources)
    client.execute(env={**os.environ, "PYTHONPATH": path})
    shown = "".join(out["text"] for out in cells[-1].outputs if out.get("name") == "stdout")
    assert shown.count("a rank of Mine") == 4
    assert "returned True rank and caller\n" in shown
    assert shown.endswith("stopped at step 3\n")


def test_a_call_that_cannot_be_pickled_is_named():
    model = BoringModel()
    model.layer.guard = {"inner": threading.Lock()}
    trainer = Trainer(strategy=Ranks(2), accelerator="auto", barebones=True)
    with pytest.raises(MisconfigurationException, match=r"model\.layer\.guard\['inner'\]") as error:
        trainer.fit(model)
    assert "`setup`" in str(error.value)
    assert isinstance(trainer.strategy.launcher, MPILauncher)

    watch = Watch([])
    watch.kept = threading.Lock()
    trainer = Trainer(
        strategy=Ranks(2), accelerator="auto", logger=False, callbacks=[watch], max_steps=1
    )
    with pytest.raises(MisconfigurationException, match=r"trainer\.callbacks\[0\]\.kept"):
        trainer.fit(BoringModel())
