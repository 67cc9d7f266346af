"""Damaged, odd and crafted files are refused in words, and change nothing."""

from __future__ import annotations

import copy
import json
import shutil
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_axosparse import (
    AxoSparseStrategy,
    CorruptFileError,
    EarlyBirdTicket,
    GradualPruning,
    Ticket,
    load_sparse,
    save_safetensors,
)
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.safetensors import decode, decode_mask, encode
from lightning_axosparse.support import archive
from lightning_axosparse.support.files import stored_shape
from tests.memory import limited
from tests.parity.cases import Net, loader, trainer
from tests.sparse.masking import apply_masks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A file of each kind, and what is in them."""
    folder = tmp_path_factory.mktemp("originals")
    torch.manual_seed(0)
    masks = {"0.weight": torch.rand(16, 16) < 0.3, "2.weight": torch.rand(3, 16) < 0.3}
    dense = model()
    apply_masks(dense, masks)
    state = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    ticket = Ticket(masks, 0.7, step=40, distances={30: 0.3, 40: 0.05})
    ticket.save(folder / "a.ticket")
    checkpoint = {"state_dict": state, "callbacks": {"EarlyBird": {"ticket": ticket.state_dict()}}}
    AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "plain.ckpt")
    save_safetensors(dense, folder / "dense.safetensors", sparse=False)
    sparse = model()
    load_sparse(sparse, folder / "plain.ckpt")
    save_safetensors(sparse, folder / "sparse.safetensors")
    return {"folder": folder, "ticket": ticket}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == tensor.dtype and torch.equal(one[name], tensor)
        for name, tensor in other.items()
    )


@pytest.mark.parametrize("name", ["plain.ckpt", "sparse.safetensors", "dense.safetensors"])
def test_a_damaged_file_does_not_change_the_module(
    originals: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Not even where only the last tensor in the file is damaged."""
    data = bytearray((originals["folder"] / name).read_bytes())
    place = len(data) - 1 if "safetensors" in name else data.rindex(b"PK\x03\x04") - 200
    data[place] ^= 1
    path = tmp_path / name
    path.write_bytes(data)
    untouched = model()
    parameters = list(untouched.parameters())
    before = {name: tensor.clone() for name, tensor in untouched.state_dict().items()}
    with pytest.raises(CorruptFileError):
        load_sparse(untouched, path, originals["ticket"])
    assert all(a is b for a, b in zip(parameters, untouched.parameters(), strict=True))
    assert same(untouched.state_dict(), before)


def test_a_run_does_not_resume_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    draw = EarlyBirdTicket(0.6, every="1 epoch", draw_by="1 epoch")
    run = trainer(
        AxoSparseStrategy(),
        callbacks=[draw, ModelCheckpoint(tmp_path, "a")],
        enable_checkpointing=True,
        max_epochs=1,
    )
    run.fit(Net(), loader(1))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    fresh = Net()
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    again = trainer(AxoSparseStrategy(), callbacks=[GradualPruning(0.6)])
    with pytest.raises(CorruptFileError, match=r"a\.ckpt' cannot be read"):
        again.fit(fresh, loader(1), ckpt_path=path, weights_only=False)
    assert same(fresh.state_dict(), before)


def bytes_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


EYE = torch.eye(8, dtype=torch.bool)


@pytest.mark.parametrize("part", ["index", "values"])
def test_a_small_record_does_not_become_a_large_one(part: str) -> None:
    bomb = bytes_of(zlib.compress(bytes(1 << 27), 9))
    tracemalloc.start()
    with pytest.raises(CorruptFileError, match="more or less than its shape"):
        decode_mask(bomb, EYE.shape) if part == "index" else decode(bomb, EYE, torch.float32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (bytes_of(zlib.compress(b"\xff\x01")), "its shape does not have"),
        (bytes_of(zlib.compress(b"\x00")[:-3]), "more or less than its shape"),
        (bytes_of(b"no code"), "cannot be decoded"),
        (torch.zeros(3), "not a row of bytes"),
    ],
)
def test_positions_that_do_not_fit(index: torch.Tensor, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        decode_mask(index, EYE.shape)


def test_values_that_do_not_fit() -> None:
    _, values = encode(torch.ones(7), EYE)
    with pytest.raises(CorruptFileError, match="fewer values than positions"):
        decode(values, EYE, torch.float32)


def test_files_of_older_versions_raise(originals: dict[str, Any], tmp_path: Path) -> None:
    state = {**originals["ticket"].state_dict(), "format": "lightning_axosparse.Ticket/1"}
    torch.save(state, tmp_path / "old.ticket")
    with pytest.raises(CorruptFileError, match=r"old\.ticket'.*Ticket/1.*reads .*Ticket/7"):
        Ticket.load(tmp_path / "old.ticket")
    header = json.dumps({"__metadata__": {"lightning_axosparse.sparse/1": "{}"}}).encode()
    old = tmp_path / "old.safetensors"
    old.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptFileError, match=r"old\.safetensors'.*it has no checksum"):
        load_sparse(model(), old, originals["ticket"])


HUGE = [1 << 17, 1 << 17]


def written_safetensors(path: Path, shape: list[int], index: bytes) -> None:
    """A file that declares a sparse tensor of any shape."""
    from safetensors.torch import save_file

    said = {"0.weight": {"shape": shape, "dtype": "float32"}}
    parts = {"0.weight.index": bytes_of(index), "0.weight.values": bytes_of(zlib.compress(b""))}
    save_file(parts, path, {"lightning_axosparse.sparse/2": json.dumps(said)})


@pytest.mark.parametrize("index", [zlib.compress(b"", 9), zlib.compress(bytes(1 << 20), 9)])
def test_shapes_are_those_of_the_module_before_anything_is_made(
    originals: dict[str, Any], tmp_path: Path, index: bytes
) -> None:
    from lightning_axosparse.checkpoint import safetensors

    path = tmp_path / "huge.safetensors"
    written_safetensors(path, HUGE, index)
    with patch.object(safetensors, "_check"), limited(1 << 30):
        state = safetensors.SafetensorsState(path)
        assert state.shapes == {"0.weight": torch.Size(HUGE)}
        alone = nn.Sequential(nn.Linear(16, 16, bias=False))
        with pytest.raises(ValueError, match=r"shape \(131072, 131072\) in the file, \(16, 16\)"):
            load_sparse(alone, path)


@pytest.mark.parametrize(
    ("shape", "words"),
    [([-16, -16], r"shape \(-16, -16\)"), ([1 << 40, 1 << 40], "no memory holds"), ("x", "shape")],
)
def test_a_ticket_has_shapes_that_there_are(
    originals: dict[str, Any], tmp_path: Path, shape: Any, words: str
) -> None:
    state = originals["ticket"].state_dict()
    masks = {**state["masks"], "shapes": {**state["masks"]["shapes"], "0.weight": shape}}
    archive.save({**state, "masks": masks}, tmp_path / "a.ticket")
    with pytest.raises(CorruptFileError, match=rf"a.ticket' cannot be read.*0.weight.*{words}"):
        Ticket.load(tmp_path / "a.ticket")


ODD: dict[str, Any] = {
    "it is no Lightning checkpoint": lambda content: content.pop("state_dict"),
    "its `state_dict` is a list, not a dict": lambda content: content.update(state_dict=[1]),
    "its `callbacks` is a int, not a dict": lambda content: content.update(callbacks=3),
    "The state of the optimizers in": lambda content: content.update(optimizer_states=[{}]),
    "The state of the optimizers": lambda content: content.update(optimizer_states=[[1]]),
    "The state of GradualPruning": lambda content: content["callbacks"].update(
        GradualPruning={"ticket": None}
    ),
    "The state of GradualPruning in": lambda content: content["callbacks"].update(
        GradualPruning=[1]
    ),
}


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumable")
    saving = ModelCheckpoint(folder, "a")
    run = trainer(
        AxoSparseStrategy(), callbacks=[GradualPruning(0.6), saving], enable_checkpointing=True
    )
    run.fit(Net(), loader(1))
    return folder / "a.ckpt"


@pytest.mark.parametrize("words", ODD)
@pytest.mark.parametrize("arguments", [{}, {"g_inter": 2, "transport": "loopback"}], ids=str)
def test_odd_contents_are_refused_in_our_words(
    resumable: Path, tmp_path: Path, words: str, arguments: dict[str, Any]
) -> None:
    content = torch.load(resumable, weights_only=True)
    ODD[words](content)
    archive.save(content, tmp_path / "odd.ckpt")
    run = trainer(AxoSparseStrategy(**arguments), callbacks=[GradualPruning(0.6)])
    with pytest.raises(CorruptFileError, match=words):
        run.fit(Net(), loader(1), ckpt_path=tmp_path / "odd.ckpt")


def deflated(source: Path, goal: Path) -> None:
    with zipfile.ZipFile(source) as records, zipfile.ZipFile(goal, "w") as copies:
        for record in records.infolist():
            copies.writestr(record.filename, records.read(record), zipfile.ZIP_DEFLATED)


def overlapping(source: Path, goal: Path) -> None:
    """Many names of one record."""
    shutil.copyfile(source, goal)
    with zipfile.ZipFile(goal, "a") as records:
        [values] = [record for record in records.infolist() if record.filename.endswith("data/0")]
        for number in range(5000):
            copied = copy.copy(values)
            copied.filename = f"a/data/{number + 1}"
            records.filelist.append(copied)
        records._didModify = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("crafted", [deflated, overlapping])
def test_records_take_no_more_memory_than_the_file(tmp_path: Path, crafted: Any) -> None:
    torch.save({"state_dict": {"a": torch.zeros(1000)}}, tmp_path / "honest.ckpt")
    crafted(tmp_path / "honest.ckpt", tmp_path / "a.ckpt")
    for read in (AtomicCheckpointIO().load_checkpoint, Ticket.load):
        with pytest.raises(CorruptFileError, match=r"a.ckpt' .*records are compressed or overlap"):
            read(tmp_path / "a.ckpt")


def test_a_tensor_is_no_larger_than_its_file(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(1).expand(*HUGE)}}, tmp_path / "a.ckpt")
    with pytest.raises(CorruptFileError, match=r"no tensor of the shape \(131072, 131072\)"):
        AtomicCheckpointIO().load_mapped(tmp_path / "a.ckpt")


@pytest.mark.parametrize("sizes", [[], [0, 3], [2, 3], (5,), torch.Size([7, 1]), [1 << 58]])
def test_shapes_that_tensors_have(sizes: Any) -> None:
    assert stored_shape(sizes, "it") == torch.Size(sizes)


@pytest.mark.parametrize(
    "sizes",
    [[-1, -8], [2.0], ["2"], [True], None, "23", {}, 5, [1 << 59], [1 << 40] * 3, [0, 1 << 62]],
)
def test_what_no_tensor_has_is_refused(sizes: Any) -> None:
    with pytest.raises(CorruptFileError, match="it has the shape"):
        stored_shape(sizes, "it")
