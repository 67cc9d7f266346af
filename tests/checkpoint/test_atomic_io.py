"""Checkpoints are Lightning's files, written whole."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_axosparse import AxoSparseStrategy, CorruptFileError
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.support import archive
from lightning_axosparse.support.patched import patched
from tests.parity.cases import BATCHES, Net, loader, trainer
from tests.ranks import run_ranks

CONTENT = {"state_dict": {"weight": torch.arange(6.0).view(2, 3)}, "epoch": 3}


@pytest.mark.parametrize("path", ["deep/a.ckpt", "file://{}/a.ckpt", "memory://deep/a.ckpt"])
def test_what_is_written_is_read(tmp_path: Path, path: str) -> None:
    where = path.format(tmp_path) if "://" in path else tmp_path / path
    files = AtomicCheckpointIO()
    files.save_checkpoint(CONTENT, where)
    torch.testing.assert_close(files.load_checkpoint(where), CONTENT, rtol=0, atol=0)
    with fsspec.open(str(where), "rb") as file:
        assert torch.load(file, weights_only=True).keys() == CONTENT.keys()
    files.remove_checkpoint(where)
    with pytest.raises(FileNotFoundError):
        files.load_checkpoint(where)


def test_the_file_is_never_in_memory(tmp_path: Path) -> None:
    content = {"state_dict": {str(i): torch.zeros(1 << 20) for i in range(8)}}  # 32 MiB
    tracemalloc.start()
    AtomicCheckpointIO().save_checkpoint(content, tmp_path / "a.ckpt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_folder_is_not_written_over_and_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "sharded.ckpt").mkdir()
    (tmp_path / "sharded.ckpt" / "stage-0.pt").touch()
    with pytest.raises(IsADirectoryError, match=r"sharded.ckpt' is a folder.*another name"):
        AtomicCheckpointIO().save_checkpoint(CONTENT, tmp_path / "sharded.ckpt")
    AtomicCheckpointIO().remove_checkpoint(tmp_path / "sharded.ckpt")
    assert not list(tmp_path.iterdir())


def test_storage_options_raise_as_in_lightning(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint(CONTENT, tmp_path / "a.ckpt", {"option": 1})


@pytest.mark.parametrize("checksums", [True, False])
def test_files_of_others_are_read_and_torn_ones_are_not(tmp_path: Path, checksums: bool) -> None:
    path = tmp_path / "a.ckpt"
    torch.serialization.set_crc32_options(checksums)
    TorchCheckpointIO().save_checkpoint(CONTENT, path)
    torch.serialization.set_crc32_options(True)
    torch.testing.assert_close(AtomicCheckpointIO().load_checkpoint(path), CONTENT)
    whole = path.read_bytes()
    changed = whole.replace(CONTENT["state_dict"]["weight"].numpy().tobytes(), bytes(24))
    damaged = [whole[:size] for size in (0, 3, 50, 500, len(whole) - 1)]
    for content in [*damaged, b"text" + whole] + ([changed] if checksums else []):
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"a\.ckpt' cannot be read"):
            AtomicCheckpointIO().load_checkpoint(path)


def test_whose_the_trainer_uses(tmp_path: Path) -> None:
    def used(*plugins: Any) -> Any:
        return trainer(AxoSparseStrategy(), plugins=[*plugins]).strategy.checkpoint_io

    theirs = TorchCheckpointIO()
    assert used(theirs) is theirs
    assert AxoSparseStrategy(checkpoint_io=theirs).checkpoint_io is theirs
    assert type(used()) is AtomicCheckpointIO
    assert type(used(AsyncCheckpointIO()).checkpoint_io) is AtomicCheckpointIO
    assert used(AsyncCheckpointIO(theirs)).checkpoint_io is theirs


def test_the_last_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    def train(save_last: Any, resume: Path | None = None) -> None:
        saving = ModelCheckpoint(
            tmp_path, "{step}", save_last=save_last, save_top_k=-1, enable_version_counter=False
        )
        run = trainer(
            AxoSparseStrategy(),
            callbacks=[saving],
            enable_checkpointing=True,
            max_epochs=2 if resume is None else 3,
        )
        run.fit(Net(), loader(1), ckpt_path=resume, weights_only=False)

    def step(path: Path) -> int:
        return int(torch.load(path, weights_only=False)["global_step"])

    last, target = tmp_path / "last.ckpt", tmp_path / f"step={2 * BATCHES}.ckpt"
    train("link")
    assert last.is_symlink()
    assert last.resolve() == target
    assert step(last) == 2 * BATCHES
    train(True, last)
    assert not last.is_symlink()
    assert (step(last), step(target)) == (3 * BATCHES, 2 * BATCHES)


FILES = {"meta.pt", "stage-0", "stage-1"}


class Waits(Callback):
    """Keeps the weights that a checkpoint should have, and lets it be written one batch later."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, at: int) -> None:
        if at == 0:
            own = {name: each for name, each in module.named_parameters() if not each.is_meta}
            self.weights = {name: each.detach().clone() for name, each in own.items()}
        self.may_write.set() if at == 1 else None


def written_in_a_thread(folder: Path, waits: Waits) -> None:
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = AxoSparseStrategy(2, 2, transport="loopback")
    run = trainer(
        strategy,
        max_steps=3,
        callbacks=[waits, saves],
        plugins=[AsyncCheckpointIO()],
        enable_checkpointing=True,
    )
    run.fit(Net(), loader(1))


def test_a_file_may_be_written_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, save = Waits(), archive.save

    def late(content: Any, path: Any) -> None:
        assert waits.may_write.wait(60)
        save(content, path)

    monkeypatch.setattr(archive, "save", late)
    written_in_a_thread(tmp_path, waits)
    assert {path.name for path in tmp_path.iterdir()} == {f"step={n}.ckpt" for n in (1, 2, 3)}
    file = torch.load(tmp_path / "step=1.ckpt", weights_only=False)
    torch.testing.assert_close(file["state_dict"], waits.weights, rtol=0, atol=0)


def files_of_run(folder: Path, in_a_thread: bool, **options: Any) -> None:
    """Keep the best and the last of three epochs; a thread writes them when training has ended."""
    ended, save = threading.Event(), archive.save

    class Ends(Callback):
        def on_train_end(self, *_: Any) -> None:
            ended.set()

    def late(content: Any, path: Any) -> None:
        assert not in_a_thread or options or ended.wait(60)
        save(content, path)

    L.seed_everything(0, verbose=False)
    best = ModelCheckpoint(folder, "{epoch}", monitor="train_loss", save_top_k=1, save_last=True)
    with patched(archive, "save", late):
        run = trainer(
            AxoSparseStrategy(2, 2, **options),
            2,
            callbacks=[best, Ends()],
            plugins=[AsyncCheckpointIO()] if in_a_thread else [],
            enable_checkpointing=True,
        )
        run.fit(Net(), loader(1))


def write_all(folder: Path) -> None:
    for kind, options in (("files", {}), ("folders", {"save_distributed_checkpoint": True})):
        for name, in_a_thread in (("plain", False), ("thread", True)):
            files_of_run(folder / kind / name, in_a_thread, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two stages have written: files and folders, without a thread and by one."""
    path = tmp_path_factory.mktemp("written")
    run_ranks(2, write_all, path)
    return path


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_a_thread_leaves_what_stages_leave_without(kind: str, written: Path) -> None:
    plain, thread = (
        {path.name: AtomicCheckpointIO().load_checkpoint(path) for path in folder.iterdir()}
        for folder in (written / kind / "plain", written / kind / "thread")
    )
    assert thread.keys() == plain.keys() == {"epoch=2.ckpt", "last.ckpt"}
    for name, content in plain.items():
        path = written / kind / "thread" / name
        files = {file.name[:7] for file in path.iterdir()} if path.is_dir() else None
        assert files == (FILES if kind == "folders" else None)
        for part in ("state_dict", "optimizer_states", "loops"):
            torch.testing.assert_close(thread[name][part], content[part], rtol=0, atol=0)


def folders_of_two_steps(folder: Path, failing: int | None) -> list[float]:
    """Write a folder after each of two steps, the first while the second trains, on two stages.

    Returns:
        The weights' sum after the first step, and that of the folder that was written then.
    """
    waits, save = Waits(), archive.save
    rank = int(os.environ["PMI_RANK"])

    def late(content: Any, path: Any) -> None:
        assert waits.may_write.wait(60)
        if rank == failing:
            raise OSError("no space left for it")
        save(content, path)

    with patched(archive, "save", late):
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        run = trainer(
            AxoSparseStrategy(2, 2, save_distributed_checkpoint=True, timeout=20),
            2,
            max_steps=2,
            callbacks=[waits, saves],
            plugins=[AsyncCheckpointIO()],
            enable_checkpointing=True,
        )
        run.fit(Net(), loader(1))
    first = AtomicCheckpointIO().load_checkpoint(folder / "step=1.ckpt")["state_dict"]
    names = waits.weights
    return [float(sum(each[name].sum() for name in names)) for each in (waits.weights, first)]


def test_folders_are_written_while_training_continues(tmp_path: Path) -> None:
    for expected, actual in run_ranks(2, folders_of_two_steps, tmp_path, None):
        assert actual == expected
    assert {path.name for path in tmp_path.iterdir()} == {"step=1.ckpt", "step=2.ckpt"}


def test_an_error_of_one_stages_thread_ends_the_run_on_all(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no space left for it"):
        run_ranks(2, folders_of_two_steps, tmp_path, 1)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]


def test_an_error_of_the_writing_thread_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(content: Any, path: Any) -> None:
        raise OSError("no space left for it")

    monkeypatch.setattr(archive, "save", fail)
    with pytest.raises(OSError, match="no space left for it"):
        written_in_a_thread(tmp_path, Waits())
    assert not [*tmp_path.iterdir()]


def test_a_file_made_by_hand_may_have_empty_dicts_for_lists(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    module, other = Net(), Net()
    content = {"state_dict": other.state_dict(), "optimizer_states": {}, "lr_schedulers": {}}
    archive.save({**content, "pytorch-lightning_version": "2.0.0"}, tmp_path / "a.ckpt")
    run = trainer(AxoSparseStrategy(), max_epochs=1, limit_train_batches=0)
    run.validate(module, loader(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    for name, value in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
