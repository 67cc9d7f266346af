"""Modules and loaders that go wrong on one rank, and a job of ranks that trains them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.distributed.mpi.environment import placement
from lightning_axosparse.distributed.rank_status import this_rank
from tests.quiet import QUIET

WIDTH, SAMPLES = 4, 4
STUCK_AT = 2
"""The batch in which things go wrong."""


def rank() -> int:
    """The number of this rank; for code that runs on ranks only."""
    return placement().rank


class Plain(L.LightningModule):
    """Two layers, which make two stages or stay together."""

    def __init__(self, faulty: int = 1) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.faulty = faulty

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == STUCK_AT and rank() == self.faulty:
            self.go_wrong()
        return self.model(batch).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.model(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def go_wrong(self) -> None:
        """Nothing does."""


class Experts(nn.Module):
    """Two experts, as those of transformers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        numbers = top_k_index[:, 0]
        computed = [
            expert(hidden_states[numbers == number]) for number, expert in enumerate(self.each)
        ]
        order = torch.cat([torch.where(numbers == number)[0] for number in range(2)])
        return torch.cat(computed)[order.argsort()] * top_k_weights


class Mixed(nn.Module):
    """Gives every other token to each of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(len(x))[:, None]
        return self.experts(x, tokens % 2, torch.ones_like(tokens, dtype=x.dtype))


def mixed(module: Plain) -> Plain:
    """A module with experts in its second layer."""
    module.model[1] = Mixed()
    return module


class SetsCallbacks(Plain):
    def on_train_end(self) -> None:
        self.trainer.callbacks = []


class Killed(Plain):
    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Leaves(Plain):
    code = 3

    def go_wrong(self) -> None:
        os._exit(self.code)


class LeavesWell(Leaves):
    code = 0


class Stopped(Plain):
    """Leaves its number in a file, for a test to kill it: it cannot be asked to end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def go_wrong(self) -> None:
        (self.folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


class Endless(Plain):
    def go_wrong(self) -> None:
        self.count_stars()

    def count_stars(self) -> None:
        while True:
            time.sleep(0.01)


class SkipsTheRest(Plain):
    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == STUCK_AT and rank() == self.faulty else None


class WantsToStop(Plain):
    def go_wrong(self) -> None:
        self.trainer.should_stop = True


class LogsAlone(Plain):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == STUCK_AT and rank() == self.faulty:
            self.log("mine", 1.0, on_step=True, sync_dist=True)


class Numbers(Dataset):
    """Ones, of a length that may differ between ranks."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(WIDTH)


class Stream(IterableDataset):
    """As :class:`Numbers`, of unknown length."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.batches * SAMPLES):
            yield torch.ones(WIDTH)


class Unequal(L.LightningDataModule):
    """Loaders with one more batch on one rank than on the others."""

    def __init__(
        self, kind: type = Numbers, longer: int = -1, where: str = "train", workers: int = 0
    ) -> None:
        super().__init__()
        self.kind, self.longer, self.where, self.workers = kind, longer, where, workers

    def _loader(self, where: str) -> DataLoader:
        more = rank() == self.longer and where == self.where
        return DataLoader(self.kind(4 + more), batch_size=SAMPLES, num_workers=self.workers)

    def train_dataloader(self) -> DataLoader:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")


def trainer(strategy: AxoSparseStrategy, devices: int = 2, **options: Any) -> L.Trainer:
    """A quiet Trainer on the CPU that leaves loaders as they are."""
    settings = {"max_epochs": 1, "use_distributed_sampler": False, **QUIET, **options}
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **settings)


def train(
    module: L.LightningModule,
    data: Unequal | None = None,
    ranks: int = 2,
    g_inter: int = 2,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> L.Trainer:
    """Train on ranks of their own."""
    run = trainer(
        AxoSparseStrategy(g_inter, **options),
        devices=ranks,
        max_epochs=2,
        callbacks=[*callbacks],
        enable_checkpointing=bool(callbacks),
        num_sanity_val_steps=0,
    )
    run.fit(module, data or Unequal())
    return run


def killed_while_connecting() -> None:
    """Train; a rank is killed while its process group is made."""
    from lightning_axosparse.distributed.mpi import process_group

    def node_collectives(communicator: Any) -> Any:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return connected(communicator)

    connected = process_group.node_collectives
    process_group.node_collectives = node_collectives
    train(Plain(), timeout=60)


class KillsItsProxy(Plain):
    def go_wrong(self) -> None:
        os.kill(this_rank().proxy, signal.SIGKILL)
        time.sleep(60)


class Terminated(Plain):
    """Receives SIGTERM, and goes on."""

    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Debugged(Plain):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if (self.current_epoch, index, rank()) == (0, STUCK_AT, self.faulty):
            breakpoint()
            print("goes on")


class Delays(Plain):
    """Has others wait for one rank in the first batches, each time for another reason."""

    seconds = 4.0

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        reasons = (self.sleep, self.compile, self.pause)
        if self.current_epoch == 0 and index < len(reasons) and rank() == self.faulty:
            reasons[index]()

    def sleep(self) -> None:
        time.sleep(self.seconds)

    def compile(self) -> None:
        """Keep numba's compiler busy, which holds Python's lock."""
        import numba

        over = time.monotonic() + self.seconds
        while time.monotonic() < over:
            numba.njit(lambda x: np.sort(x).sum() + np.linalg.norm(x))(np.ones(3))

    def pause(self) -> None:
        wake = f"sleep {self.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)


class SlowWriting(AtomicCheckpointIO):
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        time.sleep(Delays.seconds)
        super().save_checkpoint(*args, **options)


class Preempted(Plain):
    """Has mpiexec receive SIGTERM, and stays in native code, where Python runs no handler."""

    def go_wrong(self) -> None:
        mpiexec = psutil.Process(os.getppid()).parent()
        assert mpiexec is not None
        print(f"preempted at {time.time()}", flush=True)
        mpiexec.terminate()
        lock = ctypes.create_string_buffer(128)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)


if __name__ == "__main__":
    if "connecting" in sys.argv:
        killed_while_connecting()
    else:
        name, faulty, *workers = sys.argv[1:]
        data = Unequal(workers=int(workers[0]) if workers else 1)
        train(globals()[name](int(faulty)), data, timeout=60)
