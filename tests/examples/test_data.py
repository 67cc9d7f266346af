from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.examples.data import (
    EpochShuffle,
    ImageDataModule,
    TextDataModule,
    Windows,
    digits,
    read_text,
    standard_library,
    text_files,
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(4000)))
    return path


@given(size=st.integers(2, 300), context=st.integers(1, 40))
def test_windows_cover_the_text_without_overlap_and_know_what_follows(size, context):
    text = torch.arange(size).remainder(256).to(torch.uint8)
    windows = Windows(text, context)
    inputs = [windows[i][0] for i in range(len(windows))]
    targets = [windows[i][1] for i in range(len(windows))]
    covered = len(windows) * context
    assert size - 1 - context < covered <= size - 1
    if covered:
        assert torch.equal(torch.cat(inputs), text[:covered].long())
        assert torch.equal(torch.cat(targets), text[1 : covered + 1].long())


@given(size=st.integers(2, 300), context=st.integers(1, 40), at_most=st.integers(1, 20))
def test_fewer_windows_are_spread_over_the_text(size, context, at_most):
    text = torch.arange(size)
    everything, some = Windows(text, context), Windows(text, context, at_most)
    starts = [int(some[i][0][0]) for i in range(len(some))]
    assert len(some) == min(at_most, len(everything))
    assert all(len(some[i][1]) == context for i in range(len(some)))
    gaps = [b - a for a, b in pairwise([*starts, len(everything) * context])]
    assert not gaps or (min(gaps) >= context and max(gaps) - min(gaps) <= context)


@given(size=st.integers(1, 200), seed=st.integers(0, 5), epoch=st.integers(0, 50))
def test_order_depends_on_seed_and_epoch_alone(size, seed, epoch):
    first, second = EpochShuffle(size, seed), EpochShuffle(size, seed)
    list(first)
    torch.rand(3)
    first.set_epoch(epoch)
    second.set_epoch(epoch)
    order = list(first)
    assert order == list(second)
    assert sorted(order) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]:
        sampler = EpochShuffle(100, seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 3


def test_parts_are_contiguous_and_disjoint(text):
    data = TextDataModule(text, context=10, batch_size=4, held_out=0.1)
    data.setup("fit")
    parts = [data.train.text, data.validation.text, data.test.text]
    assert [len(part) for part in parts] == [3200, 400, 400]
    assert torch.cat(parts).numpy().tobytes() == text.read_bytes()


def test_batches(text):
    data = TextDataModule(text, context=10, batch_size=7)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert all(x.shape == y.shape == (7, 10) and x.dtype == torch.int64 for x, y in batches)
    assert sum(len(x) for x, _ in data.val_dataloader()) == len(data.validation)
    assert sum(len(x) for x, _ in data.test_dataloader()) == len(data.test)


def test_file_folder_and_glob(tmp_path):
    for name in ["b.txt", "sub/a.txt", "a.md"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert text_files(tmp_path / "b.txt") == [tmp_path / "b.txt"]
    assert text_files(tmp_path) == [tmp_path / n for n in ["a.md", "b.txt", "sub/a.txt"]]
    assert text_files(str(tmp_path / "**" / "*.txt")) == [
        tmp_path / "b.txt",
        tmp_path / "sub/a.txt",
    ]
    assert read_text(text_files(tmp_path)).numpy().tobytes() == b"a.mdb.txtsub/a.txt"
    assert read_text(text_files(tmp_path), max_bytes=6).numpy().tobytes() == b"a.mdb."


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    path = tmp_path / "notes[1].txt"
    path.write_text("x")
    assert text_files(path) == [path]


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    assert text_files("~/a.txt") == [tmp_path / "a.txt"]
    assert text_files("~/*.txt") == [tmp_path / "a.txt", tmp_path / "b.txt"]


def test_default_is_the_standard_library():
    files = text_files(None)
    assert standard_library() / "abc.py" in files
    assert files == sorted(files)
    outside = {"site-packages", "test", "tests", "encodings"}
    assert not any(outside & set(file.relative_to(standard_library()).parts) for file in files)


def test_nothing_found(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"missing\*\.txt.*names no file"):
        text_files(str(tmp_path / "missing*.txt"))
    with pytest.raises(MisconfigurationException, match="names no file"):
        text_files(tmp_path)


def test_too_little_text(text):
    with pytest.raises(MisconfigurationException, match=r"200 for validation.*takes 301"):
        TextDataModule(text, context=300).setup("fit")
    data = TextDataModule(text, context=100, batch_size=64)
    data.setup("fit")
    with pytest.raises(MisconfigurationException, match=r"35 training windows.*batch_size=64"):
        data.train_dataloader()


def test_digits_are_split_without_overlap_and_always_alike() -> None:
    images, classes = digits()
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (-1, 1)
    assert classes.bincount().min() > 170
    data, again = ImageDataModule(held_out=0.1), ImageDataModule(held_out=0.1, seed=1)
    for each in (data, again):
        each.setup("fit")
    parts = [part.tensors[0] for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [1457, 161, 179]
    assert torch.equal(torch.cat(parts), images)
    assert torch.equal(data.test.tensors[1], again.test.tensors[1])


def test_batches_are_whole_and_their_order_depends_on_seed_and_epoch() -> None:
    data = ImageDataModule(batch_size=100, seed=3)
    data.setup("fit")
    loader = data.train_dataloader()
    first = [batch[1] for batch in loader]
    assert {len(batch) for batch in first} == {100}
    loader.sampler.set_epoch(1)
    assert not torch.equal(torch.cat(first), torch.cat([batch[1] for batch in loader]))
    assert sum(len(classes) for _, classes in data.val_dataloader()) == len(data.validation)
    assert sum(len(classes) for _, classes in data.test_dataloader()) == len(data.test)


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MisconfigurationException, match=r"pip install scikit-learn"):
        digits()
