"""Folders to which all stages write: whole or not at all, and readable by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy, CorruptFileError, EarlyBirdTicket
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.consolidate import consolidate
from lightning_axosparse.checkpoint.folder import files_of, save_folder
from lightning_axosparse.checkpoint.gather import StageTensors
from lightning_axosparse.strategy import pipeline_strategy
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import DeferredTensor, all_computed
from lightning_axosparse.support.files import clear_partials
from lightning_axosparse.support.patched import patched
from tests.parity.cases import Net, loader, recorded, trainer
from tests.ranks import run_ranks, warm_python


def checkpoint(step: int) -> dict[str, Any]:
    values = torch.full((3, 200), float(step))
    weight = DeferredTensor("state_dict.a", values.shape, values.dtype, partial(_same, values))
    return {"state_dict": {"a": weight, "tied": weight, "b": torch.tensor(step)}, "step": step}


def _same(values: Tensor) -> Tensor:
    return values


def save(step: int, path: Path | str) -> None:
    save_folder(checkpoint(step), path, StageTensors(lambda: None))


def load(path: Path | str) -> int:
    """The step of a checkpoint, all of whose values are of that step."""
    whole = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    step = int(whole["step"])
    assert whole["state_dict"]["a"].eq(step).all()
    assert whole["state_dict"]["tied"] is whole["state_dict"]["a"]
    assert whole["state_dict"]["b"] == step
    return step


def test_one_file_of_it_is_the_one_that_is_written_otherwise(tmp_path: Path) -> None:
    save(7, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt") == 7
    archive.save(all_computed(checkpoint(7)), tmp_path / "plain.ckpt")
    assert consolidate(tmp_path / "a.ckpt") == tmp_path / "a.ckpt.consolidated"
    module = "lightning_axosparse.checkpoint.consolidate"
    command = [*warm_python(), "-m", module, str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]
    subprocess.run(command, check=True, capture_output=True)
    plain = torch.load(tmp_path / "plain.ckpt")
    for name in ("a.ckpt.consolidated", "b.ckpt"):
        torch.testing.assert_close(torch.load(tmp_path / name), plain, rtol=0, atol=0)
        assert (tmp_path / name).stat().st_size == (tmp_path / "plain.ckpt").stat().st_size
    with pytest.raises(NotADirectoryError, match=r"b.ckpt' is no folder"):
        consolidate(tmp_path / "b.ckpt")


def killed_at(event: int, step: int, path: Path) -> bool:
    """Save in a child process that is killed at its n-th system event; whether it was."""
    child = os.fork()
    if child == 0:
        left = event

        def count(name: str, arguments: Any) -> None:
            nonlocal left
            if name.startswith(("open", "os.", "shutil.", "ctypes.", "fcntl.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save(step, path)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    path, event, found = tmp_path / "last.ckpt", 1, []
    save(0, path)
    while killed_at(event, event, path):
        found.append(load(path))
        event += 1
    assert load(path) == event, "the last one was not killed"
    assert {0, event - 1} <= {*found}, "some were killed before the new one took the place"
    assert all(step in (event_, earlier) for event_, earlier, step in _with_earlier(found))
    clear_partials(tmp_path)
    assert [*tmp_path.iterdir()] == [path]


def test_a_kill_while_a_new_one_is_written_leaves_none(tmp_path: Path) -> None:
    path, event, absent = tmp_path / "last [1].ckpt", 1, 0
    while killed_at(event, 1, path):
        if path.exists():
            assert load(path) == 1
            break
        absent += 1
        event += 1
    assert absent > 5
    clear_partials(tmp_path)
    assert {*tmp_path.iterdir()} <= {path}


def test_what_a_killed_save_leaves_in_a_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "last [1].ckpt"
    save(0, path)
    (path / "stage-0.0123456789abcdef0123456789abcdef.pt").touch()
    (path / ".stage-0.0123456789abcdef.pt.0123456789ab.partial").touch()
    save(1, path)
    assert load(path) == 1
    assert {*path.iterdir()} == {*files_of(path)}
    assert len(files_of(path)) == 2


def _with_earlier(found: list[int]) -> list[tuple[int, int, int]]:
    """Of each kill: the step that was being written, the one that was there before, what is."""
    return [(n + 1, ([0, *found])[n], step) for n, step in enumerate(found)]


def test_it_takes_the_place_of_a_link(tmp_path: Path) -> None:
    folder, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    save(1, folder)
    link.symlink_to(folder.name)
    assert load(link) == 1
    save(2, link)
    assert (load(link), load(folder), link.is_symlink()) == (2, 1, False)
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "last.ckpt"}


def test_it_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    for step in (1, 2):
        save(step, tmp_path / "a.ckpt")
        assert load(tmp_path / "a.ckpt") == step
        assert len(files_of(tmp_path / "a.ckpt")) == 2


def test_it_is_written_to_and_read_from_other_file_systems() -> None:
    for step in (1, 2):
        save(step, "memory://folder/a.ckpt")
        assert load("memory://folder/a.ckpt") == step
    with pytest.raises(FileNotFoundError):
        load("memory://folder/b.ckpt")
    table = fsspec.filesystem("memory").open("/folder/a.ckpt/meta.pt", "r+b")
    table.write(b"damage")
    table.close()
    with pytest.raises(CorruptFileError, match=r"memory://folder/a\.ckpt' cannot be read"):
        load("memory://folder/a.ckpt")


def change_one_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(b"state_dict")] ^= 1
    file.write_bytes(data)


def end_early(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def link_away(file: Path) -> None:
    os.replace(file, file.parent.parent / file.name)
    file.symlink_to(file.parent.parent / file.name)


def take_that_of_another(file: Path) -> None:
    other = file.parent.parent / "b.ckpt"
    save(2, other)
    os.replace(files_of(other)[file.name != "meta.pt"], file)


@pytest.mark.parametrize(
    "damage", [change_one_byte, end_early, link_away, take_that_of_another, Path.unlink]
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_one_is_refused(tmp_path: Path, number: int, damage: Any) -> None:
    path = tmp_path / "a.ckpt"
    save(1, path)
    assert {*path.iterdir()} == {*files_of(path)}
    damage(files_of(path)[number])
    with pytest.raises(CorruptFileError, match=r"a\.ckpt.*cannot be read"):
        load(path)


def test_a_tensor_that_no_stage_has_written_is_named(tmp_path: Path) -> None:
    save(1, tmp_path / "a.ckpt")
    _, file = files_of(tmp_path / "a.ckpt")
    archive.save({**torch.load(file), "state_dict": {}}, file)
    with pytest.raises(CorruptFileError, match=r"a.ckpt' .*has no tensor 'state_dict.a'"):
        load(tmp_path / "a.ckpt")


def test_how_to_take_a_folder_of_another_strategy_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "a.ckpt" / "meta.pt").touch()
    with pytest.raises(CorruptFileError, match=r"utilities.consolidate_checkpoint FOLDER"):
        load(tmp_path / "a.ckpt")


def train(path: Path, **options: Any) -> None:
    """Train for three epochs with a draw after the first, and save after each."""
    ticket = EarlyBirdTicket(0.6, every="1 epoch", draw_by="1 epochs")
    run = trainer(
        AxoSparseStrategy(g_inter=2, microbatches=2, save_distributed_checkpoint=True, **options),
        2,
        callbacks=[ticket, ModelCheckpoint(path, "{step}", save_top_k=-1)],
        enable_checkpointing=True,
        max_epochs=3,
    )
    run.fit(Net(), loader(1, batches=2))


def save_on_ranks(path: Path, fails: bool) -> str:
    """Write a folder of the job's ranks, the second of which may fail; the error of this rank."""

    def made() -> Tensor:
        if fails and rank == 1:
            raise OSError("no space left for it")
        return torch.full((400,), float(rank))

    tensors, rank = StageTensors(lambda: dist.group.WORLD), dist.get_rank()
    parts = tensors.gather({str(rank): DeferredTensor(str(rank), (400,), torch.float32, made)})
    try:
        save_folder({name: value for part in parts for name, value in part.items()}, path, tensors)
    except OSError as error:
        return str(error)
    return ""


def resumed(path: str) -> tuple[dict[str, Tensor], int]:
    """The weights after a resumed fourth epoch, and how often this rank copied the checkpoint."""
    copies, copied = 0, pipeline_strategy.local_copy

    def counted(path: Any) -> Any:
        nonlocal copies
        copies += 1
        return copied(path)

    with patched(pipeline_strategy, "local_copy", counted):
        run, module = trainer(AxoSparseStrategy(2, 2), 2, max_epochs=4), Net()
        run.fit(module, loader(1, batches=2), ckpt_path=path)
    assert run.global_step == 8
    return recorded(run, module).weights, copies


def from_elsewhere(path: Path) -> list[tuple[dict[str, Tensor], int]]:
    """Resume from a path and from a URL: of a folder, and of a file."""
    found = []
    for as_folder in (True, False):
        strategy = AxoSparseStrategy(2, 2, save_distributed_checkpoint=as_folder)
        run = trainer(strategy, 2, max_epochs=3)
        run.fit(Net(), loader(1, batches=2))
        for name in (f"{path}/{as_folder}.ckpt", f"local://{path}/there/{as_folder}.ckpt"):
            run.save_checkpoint(name)
            found.append(resumed(name))
    return found


def test_each_node_copies_a_checkpoint_from_elsewhere_once(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, from_elsewhere, tmp_path)):
        for (here, none), (there, copies) in (found[:2], found[2:]):
            assert (none, copies) == (0, rank == 0)
            torch.testing.assert_close(there, here, atol=0, rtol=0)
    assert (tmp_path / "there" / "True.ckpt").is_dir()
    assert not [*tmp_path.glob("**/.*")]


def two_ranks(path: Path) -> list[str]:
    train(path / "stages")
    train(path / "regrid", regrid=1)
    return [save_on_ranks(path / "error", fails) for fails in (False, True)]


NAMES = ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


def test_stages_write_a_file_each_and_an_error_of_one_is_raised_on_all(tmp_path: Path) -> None:
    for written, failed in run_ranks(2, two_ranks, tmp_path):
        assert written == ""
        assert "was not written: stage 1: no space left for it. An older" in failed
    whole = AtomicCheckpointIO().load_checkpoint(tmp_path / "error")
    assert [int(whole[str(rank)].unique()) for rank in (0, 1)] == [0, 1]
    for way in ("stages", "regrid"):
        assert sorted(path.name for path in (tmp_path / way).iterdir()) == NAMES
        for path in (tmp_path / way).iterdir():
            names = [file.name.split(".")[0] for file in files_of(path)]
            assert names in (["meta", "stage-0", "stage-1"], ["meta", "stage-0"])
            assert len(names) == 3 or way == "regrid"
            assert len([*path.iterdir()]) == len(names)
    assert not [*tmp_path.glob("**/.*")]
