"""A mutated file of any kind loads as it was written or is refused, whoever mutated it.

Damage is found by checksums. Who means harm writes checksums anew: then a file may load other
values, but runs nothing and takes no more than twice the memory.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from lightning_axosparse import (
    CorruptFileError,
    Ticket,
    load_sparse,
    save_safetensors,
)
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.folder import save_folder
from lightning_axosparse.checkpoint.gather import StageTensors
from lightning_axosparse.support.archive import DeferredTensor
from tests.memory import limited
from tests.sparse.masking import apply_masks

SLACK = 1 << 16
"""Bytes of Python's objects: of the error, its traceback and its message."""

MEASURED = 5
"""Of so many loads the memory of one is measured, as that takes three times as long."""

RESERVE = 1 << 28
"""Bytes that every load may reserve."""


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        path: of the file or folder.
        load: reads all of it.
        seal: writes the checksums of mutated bytes anew.
    """

    path: Path
    load: Callable[[Path], Any]
    seal: Callable[[bytearray], None]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8), nn.BatchNorm1d(8))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    folder = tmp_path_factory.mktemp("whole")
    dense = model()
    masks = {"0.weight": torch.rand(16, 24) < 0.3, "1.weight": torch.rand(8, 16) < 0.3}
    apply_masks(dense, masks)
    ticket = Ticket(masks, 0.7, step=40, distances={30: 0.3, 40: 0.05})
    ticket.save(folder / "a.ticket")
    optimizer = torch.optim.AdamW(dense.parameters())
    dense(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    apply_masks(dense, masks)
    checkpoint = {
        "epoch": 3,
        "state_dict": {name: value.clone() for name, value in dense.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "callbacks": {"GradualPruning": {"ticket": ticket.state_dict()}},
        "hyper_parameters": {"width": 24, "name": "net"},
    }
    AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "plain.ckpt")
    write_folder(checkpoint, folder / "folder.ckpt")
    sparse = model()
    load_sparse(sparse, folder / "plain.ckpt")
    save_safetensors(sparse, folder / "sparse.safetensors")
    save_safetensors(dense, folder / "dense.safetensors", sparse=False)
    return {
        "ticket": Kind(folder / "a.ticket", load_ticket, seal_archive),
        "checkpoint": Kind(folder / "plain.ckpt", load_checkpoint, seal_archive),
        "folder": Kind(folder / "folder.ckpt", load_checkpoint, seal_archive),
        "sparse safetensors": Kind(folder / "sparse.safetensors", load_weights, seal_safetensors),
        "dense safetensors": Kind(
            folder / "dense.safetensors",
            lambda path: load_weights(path, folder / "a.ticket"),
            seal_safetensors,
        ),
    }


def write_folder(checkpoint: Any, path: Path) -> None:
    def later(name: str, value: Tensor) -> DeferredTensor:
        return DeferredTensor(name, value.shape, value.dtype, lambda: value)

    state = {name: later(name, value) for name, value in checkpoint["state_dict"].items()}
    save_folder({**checkpoint, "state_dict": state}, path, StageTensors(lambda: None))


def load_ticket(path: Path) -> Any:
    ticket = Ticket.load(path)
    return ticket.state_dict(), dict(ticket.masks)


def load_checkpoint(path: Path) -> Any:
    """As a run does that resumes."""
    files = AtomicCheckpointIO()
    files.verify(path)
    return files.load_mapped(path, weights_only=True)


def load_weights(path: Path, ticket: Path | None = None) -> Any:
    loaded = model()
    kept = load_sparse(loaded, path, ticket)
    return kept.state_dict(), dict(loaded.state_dict())


def seal_archive(data: bytearray) -> None:
    """As torch writes it without checksums."""
    for entry in re.finditer(rb"PK\x01\x02", bytes(data)):
        data[entry.start() + 16 : entry.start() + 20] = bytes(len(data[entry.start() + 16 :][:4]))


def seal_safetensors(data: bytearray) -> None:
    found = re.search(rb'"lightning_axosparse.crc32": "([0-9a-f]{8})"', data)
    if found is not None:
        start, end = found.span(1)
        data[start:end] = b"0" * 8
        data[start:end] = b"%08x" % crc32(data)


class Storages(TorchDispatchMode):
    """Adds up the storages that appear in operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor and not leaf.is_meta:
                self.seen.setdefault(leaf.untyped_storage()._cdata, leaf.detach())
        return result

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.seen.values())


EVENTS: list[str] = []
"""What the process did while ``WATCHED``, of what a file could make it do."""
WATCHED = [False]
CALLS = (
    "pickle.find_class",
    "exec",
    "import",
    "os.",
    "subprocess.",
    "shutil.",
    "socket.",
    "ctypes.",
)
HARMLESS = ("os.listdir", "os.scandir")


def watch(event: str, arguments: Any) -> None:
    if WATCHED[0] and event.startswith(CALLS) and event not in HARMLESS:
        EVENTS.append(f"{event}{arguments}")


sys.addaudithook(watch)
import encodings.cp437  # noqa: E402  (of zip archives with odd names)
import encodings.raw_unicode_escape  # noqa: E402, F401  (of text in pickles)


@contextmanager
def watched() -> Iterator[None]:
    """Notes in ``EVENTS`` what happens in the context, which gets few memory in one piece."""
    EVENTS.clear()
    with limited(RESERVE):
        WATCHED[0] = True
        try:
            yield
        finally:
            WATCHED[0] = False


@contextmanager
def measured() -> Iterator[Callable[[], int]]:
    """Measures the memory that is taken in the context: Python's, numpy's and torch's."""
    tracemalloc.start()
    try:
        with Storages() as storages:
            yield lambda: tracemalloc.get_traced_memory()[1] + storages.bytes
    finally:
        tracemalloc.stop()


def same(one: Any, other: Any) -> bool:
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )


def flip(data: bytearray, at: int, length: int, value: int) -> None:
    data[at] ^= 1 << value % 8


def overwrite(data: bytearray, at: int, length: int, value: int) -> None:
    data[-1 - at % 600 % len(data)] = value  # names, sizes and places are at an archive's end


def truncate(data: bytearray, at: int, length: int, value: int) -> None:
    del data[at:]


def remove(data: bytearray, at: int, length: int, value: int) -> None:
    del data[at : at + length]


def duplicate(data: bytearray, at: int, length: int, value: int) -> None:
    data[at:at] = data[at : at + length]


def splice(data: bytearray, at: int, length: int, value: int) -> None:
    """Copy a range over another."""
    part = data[at : at + length]
    to = at * 7919 % len(data)
    data[to : to + len(part)] = part


def change_digit(data: bytearray, at: int, length: int, value: int) -> None:
    """Change a number in what reads as text: sizes, shapes, offsets, checksums."""
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if digits:
        data[digits[at % len(digits)]] = 48 + value % 10


Edit = Callable[[bytearray, int, int, int], None]
EDITS: list[Edit] = [flip, overwrite, truncate, remove, duplicate, splice, change_digit]


def mutate(data: bytearray, random: random.Random) -> None:
    for _ in range(random.randint(1, 3)):
        if data:
            edit = random.choice(EDITS)
            length = random.choice([1, 4, 16, 64, 300])
            edit(data, random.randrange(len(data)), length, random.randrange(256))


def mutated(kind: Kind, to: Path, random: random.Random, seals: bool) -> bool:
    """Write a mutated copy; whether it differs."""
    if kind.path.is_dir():
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(kind.path, to)
        files = [to / name for name in sorted(file.name for file in kind.path.iterdir())]
        changed = random.choice(files)
    else:
        shutil.copyfile(kind.path, to)
        changed = to
    whole = changed.read_bytes()
    data = bytearray(whole)
    mutate(data, random)
    if seals:
        kind.seal(data)
    changed.write_bytes(data)
    return data != whole


NAMES = ["ticket", "checkpoint", "folder", "sparse safetensors", "dense safetensors"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seals", [False, True], ids=["damage", "sealed"])
@pytest.mark.parametrize("mutations", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_mutation_does_harm(
    kinds: dict[str, Kind], tmp_path: Path, mutations: int, seals: bool, name: str
) -> None:
    kind, outcomes = kinds[name], {"refused": 0, "the same": 0, "others": 0}
    kind.load(kind.path)
    with watched(), measured() as taken:
        whole = kind.load(kind.path)
        allowed = 2 * taken() + SLACK
    assert not EVENTS
    path = tmp_path / kind.path.name
    for number in range(mutations):
        differs = mutated(kind, path, random.Random(number), seals)
        measure = measured() if number % MEASURED == 0 else nullcontext(lambda: 0)
        with watched(), measure as taken:
            found, refused = load(kind, path, seals)
            assert taken() < allowed, (number, taken(), allowed)
        assert not EVENTS, (number, EVENTS)
        assert "allocate" not in refused, (number, refused)
        if found is None:
            outcomes["refused"] += 1
            assert differs
            assert seals or str(path) in refused
        else:
            outcomes["the same" if same(found, whole) else "others"] += 1
    assert outcomes["refused"] > mutations / 10, outcomes
    assert seals or outcomes["others"] == 0, outcomes


def load(kind: Kind, path: Path, seals: bool) -> tuple[Any, str]:
    """What is in a file, or None and why it was refused."""
    try:
        return kind.load(path), ""
    except CorruptFileError as error:
        return None, str(error)
    except ValueError as error:  # names or shapes that the module does not have
        if not seals:
            raise
        return None, str(error)
