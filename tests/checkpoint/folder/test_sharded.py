"""Folders to which all stages write: whole or not at all, and readable by name."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.strategies.model_parallel import _distributed_checkpoint_save
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from lightning_axosparse import AxoSparseStrategy, CorruptFileError
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.consolidate import consolidate
from lightning_axosparse.checkpoint.folder import manifest, shard_metadata, sharded
from lightning_axosparse.checkpoint.folder.shard_metadata import Chunk, StoredTensor
from lightning_axosparse.checkpoint.folder.sharded import table
from lightning_axosparse.checkpoint.folder.stage_tensors import StageTensors
from lightning_axosparse.checkpoint.folder.writer import FolderWriter
from lightning_axosparse.support.files import archive
from lightning_axosparse.support.files.atomic_file import clear_partials
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, all_made
from tests.parity.cases import Net, loader, trainer


def checkpoint(step: int) -> dict[str, Any]:
    values = torch.full((3, 200), float(step))
    weight = DeferredTensor("state_dict.a", values.shape, values.dtype, partial(_same, values))
    return {"state_dict": {"a": weight, "tied": weight, "b": torch.tensor(step)}, "step": step}


def _same(values: Tensor) -> Tensor:
    return values


def save(step: int, path: Path, in_thread: bool = False) -> None:
    writer = FolderWriter(StageTensors(lambda: None), in_thread)
    writer.save(checkpoint(step), path)
    writer.wait()


def load(path: Path) -> int:
    """The step of a checkpoint, all of whose values are of that step."""
    whole = all_made(AtomicCheckpointIO().load_checkpoint(path, weights_only=True))
    step = int(whole["step"])
    assert whole["state_dict"]["a"].eq(step).all()
    assert whole["state_dict"]["tied"] is whole["state_dict"]["a"]
    assert whole["state_dict"]["b"] == step
    return step


def test_one_file_of_it_is_the_one_that_is_written_otherwise(tmp_path: Path) -> None:
    save(7, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt") == 7
    archive.save(all_made(checkpoint(7)), tmp_path / "plain.ckpt")
    assert consolidate(tmp_path / "a.ckpt") == tmp_path / "a.ckpt.consolidated"
    module = "lightning_axosparse.checkpoint.consolidate"
    command = [sys.executable, "-m", module, str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]
    subprocess.run(command, check=True, capture_output=True)
    plain = torch.load(tmp_path / "plain.ckpt")
    for name in ("a.ckpt.consolidated", "b.ckpt"):
        torch.testing.assert_close(torch.load(tmp_path / name), plain, rtol=0, atol=0)
        assert (tmp_path / name).stat().st_size == (tmp_path / "plain.ckpt").stat().st_size
    with pytest.raises(NotADirectoryError, match=r"b.ckpt' is no folder"):
        consolidate(tmp_path / "b.ckpt")


def killed_at(event: int, step: int, path: Path, in_thread: bool) -> bool:
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
        save(step, path, in_thread)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path, in_thread: bool) -> None:
    path, event, found = tmp_path / "last.ckpt", 1, []
    save(0, path)
    while killed_at(event, event, path, in_thread):
        found.append(load(path))
        event += 1
    assert load(path) == event, "the last one was not killed"
    assert {0, event - 1} <= {*found}, "some were killed before the new one took the place"
    assert all(step in (event_, earlier) for event_, earlier, step in _with_earlier(found))
    clear_partials(tmp_path)
    assert [*tmp_path.iterdir()] == [path]


def _with_earlier(found: list[int]) -> list[tuple[int, int, int]]:
    """Of each kill: the step that was being written, the one that was there before, what is."""
    return [(n + 1, ([0, *found])[n], step) for n, step in enumerate(found)]


def test_it_takes_the_place_of_a_file_and_of_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    file.write_text("older")
    save(1, file)
    link.symlink_to(file.name)
    assert load(link) == 1
    save(2, link)
    assert (load(link), load(file), link.is_symlink()) == (2, 1, False)
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "last.ckpt"}


def test_it_works_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_axosparse.support.files import atomic_file

    monkeypatch.setattr(atomic_file, "_exchanged", lambda one, other: False)
    for step in (1, 2):
        save(step, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


FILES = ["meta.pt", ".metadata", "__0_0.distcp", "manifest.json"]


def change_one_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def end_early(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def link_away(file: Path) -> None:
    os.replace(file, file.parent.parent / file.name)
    file.symlink_to(file.parent.parent / file.name)


def take_that_of_another(file: Path) -> None:
    save(2, file.parent.parent / "b.ckpt")
    os.replace(file.parent.parent / "b.ckpt" / file.name, file)


@pytest.mark.parametrize("damage", [change_one_byte, end_early, link_away, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_refused(tmp_path: Path, name: str, damage: Any) -> None:
    path = tmp_path / "a.ckpt"
    save(1, path)
    assert {file.name for file in path.iterdir()} == {*FILES}
    damage(path / name)
    if (name, damage) == ("manifest.json", Path.unlink):
        with pytest.warns(UserWarning, match=r"a.ckpt' has no manifest.json"):
            assert load(path) == 1
        return
    with pytest.raises(CorruptFileError, match=r"a\.ckpt.*cannot be read"):
        load(path)


@pytest.mark.parametrize("name", FILES[:3])
def test_files_of_two_checkpoints_are_not_mixed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.ckpt"
    save(1, path)
    take_that_of_another(path / name)
    with pytest.raises(CorruptFileError, match=f"'{name}' is not the file that manifest"):
        load(path)


@pytest.mark.filterwarnings("ignore:.* has no manifest.json")
def test_without_a_manifest_damage_in_tensors_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(1, path)
    (path / "manifest.json").unlink()
    shard = path / FILES[2]
    data = bytearray(shard.read_bytes())
    data[data.index(torch.ones(50).numpy().tobytes()) + 70] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"a\.ckpt' cannot be read.*Bad CRC"):
        load(path)


class Names:
    """Pickled as a call of something."""

    def __init__(self, called: Any, *arguments: Any) -> None:
        self.called, self.arguments = called, arguments

    def __reduce__(self) -> Any:
        return self.called, self.arguments


def changed_metadata(path: Path, change: Any) -> None:
    """Change what torch says of tensors, without a manifest, as who means harm would."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    (name,) = metadata.state_dict_metadata
    (index,) = metadata.storage_data
    change(metadata, metadata.state_dict_metadata[name], metadata.storage_data[index])
    file.write_bytes(pickle.dumps(metadata))
    (path / "manifest.json").unlink()


CHANGES: dict[str, Any] = {
    "which torch's format does not have": lambda all, tensor, place: setattr(
        all, "planner_data", Names(os.mkdir, "was-called")
    ),
    r"'../x' is not the name of a file in the folder": lambda all, tensor, place: setattr(
        place, "relative_path", "../x"
    ),
    r"'/etc/passwd' is not the name of": lambda all, tensor, place: setattr(
        place, "relative_path", "/etc/passwd"
    ),
    r"'' is not the name of": lambda all, tensor, place: setattr(place, "relative_path", ""),
    "No such file": lambda all, tensor, place: setattr(place, "relative_path", "another"),
    "is larger than its part": lambda all, tensor, place: setattr(place, "length", 500),
    "is larger than its part of '__0_0": lambda all, tensor, place: setattr(
        place, "offset", 1 << 40
    ),
    "has the dtype 'float32'": lambda all, tensor, place: setattr(
        tensor.properties, "dtype", "float32"
    ),
    "do not fill it": lambda all, tensor, place: setattr(tensor, "size", torch.Size([3, 1 << 40])),
    r"has the shape \(-3, -200\)": lambda all, tensor, place: setattr(
        tensor, "size", torch.Size([-3, -200])
    ),
    "which no memory holds": lambda all, tensor, place: setattr(
        tensor, "size", torch.Size([1 << 40, 1 << 40])
    ),
    "the folder has no tensor 'state_dict.a' of": lambda all, tensor, place: (
        setattr(tensor, "size", torch.Size([600])),
        setattr(tensor.chunks[0], "sizes", torch.Size([600])),
        setattr(tensor.chunks[0], "offsets", torch.Size([0])),
        all.storage_data.update({MetadataIndex("state_dict.a", [0]): place}),
    ),
    "by an extension": lambda all, tensor, place: setattr(place, "transform_descriptors", ["zip"]),
}


@pytest.mark.filterwarnings("ignore:.* has no manifest.json")
@pytest.mark.parametrize("words", CHANGES)
@pytest.mark.parametrize("weights_only", [True, False])
def test_metadata_that_means_harm_is_refused(
    tmp_path: Path, words: str, weights_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    monkeypatch.chdir(tmp_path)
    save(1, path)
    changed_metadata(path, CHANGES[words])
    (tmp_path / "x").write_bytes((path / FILES[2]).read_bytes())
    with pytest.raises(CorruptFileError, match=rf"a\.ckpt' cannot be read.*{words}"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    assert not (tmp_path / "was-called").exists()


@pytest.mark.parametrize("weights_only", [True, False])
def test_no_run_begins_with_metadata_that_names_a_function(
    tmp_path: Path, weights_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(1, tmp_path / "a")
    changed_metadata(tmp_path / "a", next(iter(CHANGES.values())))
    manifest.write(
        tmp_path / "a", {name: manifest.entry(tmp_path / "a" / name) for name in FILES[:3]}
    )
    run = trainer(AxoSparseStrategy(microbatches=2))
    with pytest.raises(CorruptFileError, match=r"metadata names \w+.mkdir, which torch's format"):
        run.fit(Net(), loader(1), ckpt_path=tmp_path / "a", weights_only=weights_only)
    with pytest.raises(CorruptFileError, match=r"metadata names \w+.mkdir, which torch's format"):
        consolidate(tmp_path / "a")
    assert not (tmp_path / "was-called").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "..", ".", "", "none"])
def test_a_manifest_lists_files_of_its_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.ckpt"
    save(1, path)
    (tmp_path / "x").write_bytes(b"")
    manifest.write(path, {name: manifest.entry(tmp_path / "x")})
    with pytest.raises(CorruptFileError, match=r"is not the name of a file|No such file"):
        load(path)
    manifest.write(path, {"meta.pt": manifest.entry(table(path))})
    with pytest.raises(CorruptFileError, match=r"distcp', which the manifest does not list"):
        load(path)


def torchs_folder(path: Path, module: nn.Module, optimizer: Optimizer, weights: str) -> None:
    """Write what Lightning's strategies of torch's sharding write of a module in one process."""
    states = get_optimizer_state_dict(module, optimizer)
    with warnings.catch_warnings(action="ignore"):
        _distributed_checkpoint_save({weights: module.state_dict(), "optimizer_0": states}, path)


@pytest.mark.parametrize("weights", ["state_dict", "model"])
def test_folders_of_lightnings_other_strategies_load_with_a_warning(
    tmp_path: Path, weights: str
) -> None:
    whole = trainer(callbacks=[ModelCheckpoint(tmp_path, "whole")], enable_checkpointing=True)
    whole.fit(Net(), loader(1))
    rest = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    torchs_folder(tmp_path / "a.ckpt", whole.lightning_module, whole.optimizers[0], weights)
    expected = dict(rest)
    del rest["state_dict"], rest["optimizer_states"]
    torch.save(rest, table(tmp_path / "a.ckpt"))
    with pytest.warns(UserWarning, match=r"a.ckpt' has no manifest.json") as warned:
        found = AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert len([each for each in warned if "manifest" in str(each.message)]) == 1
    torch.testing.assert_close(found["state_dict"], dict(expected["state_dict"]), rtol=0, atol=0)
    [state], [other] = found["optimizer_states"], expected["optimizer_states"]
    torch.testing.assert_close(state["state"], other["state"], rtol=0, atol=0)
    for group, expected_group in zip(state["param_groups"], other["param_groups"], strict=True):
        assert {**group, "betas": 0} == {**expected_group, "betas": 0}
    assert found["loops"] == expected["loops"]


def test_a_folder_of_torch_alone_has_weights(tmp_path: Path) -> None:
    module = Net()
    torchs_folder(tmp_path / "a", module, torch.optim.SGD(module.parameters()), "state_dict")
    run = trainer(AxoSparseStrategy())
    other = Net()
    with pytest.warns(UserWarning, match="has no manifest.json"):
        run.validate(other, loader(2), ckpt_path=tmp_path / "a", verbose=False)
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)


def test_chunks_of_many_ranks_are_one_tensor_again(tmp_path: Path) -> None:
    """As ranks write a DTensor that is split among them."""
    whole, half = torch.randn(6, 4), slice(0, 3)
    parts = [((0, 0), whole[half]), ((3, 0), whole[3:, :2]), ((3, 2), whole[3:, 2:])]
    chunks, data = [], b""
    for offsets, part in parts:
        buffer = io.BytesIO()
        torch.save(part.clone(), buffer)
        length = len(buffer.getvalue())
        chunks.append(Chunk(offsets, tuple(part.shape), "x.distcp", len(data), length))
        data += buffer.getvalue()
    (tmp_path / "x.distcp").write_bytes(data)
    tensor = StoredTensor(("w",), whole.shape, whole.dtype, chunks)
    assert torch.equal(sharded._read(tmp_path, tensor), whole)
    assert shard_metadata._fill(chunks, whole.shape)
    assert not shard_metadata._fill(chunks[:2], whole.shape)
    assert not shard_metadata._fill([*chunks[:2], chunks[1]], whole.shape)
    assert not shard_metadata._fill(chunks, torch.Size([4, 6]))
