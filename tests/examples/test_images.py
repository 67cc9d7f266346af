from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.examples.images import ImageDataModule, digits, read_cifar10


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


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Files of its format, with few images."""
    generator = np.random.default_rng(0)
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        records = generator.integers(0, 256, (10, 3073), np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / f"{name}.bin")
    return tmp_path


def test_cifar10_is_read_from_its_binary_files(cifar: Path) -> None:
    data = ImageDataModule(cifar, held_out=0.25)
    data.setup("fit")
    assert [len(part) for part in (data.train, data.validation, data.test)] == [15, 5, 10]
    record = np.fromfile(cifar / "data_batch_1.bin", np.uint8)[3073:6146]
    image, label = data.train[1]
    assert label == record[0]
    assert image.shape == (3, 32, 32)
    assert image[2, 1, 3] == pytest.approx(record[1 + 2 * 1024 + 32 + 3] / 127.5 - 1)


def test_files_that_are_missing_or_of_another_kind_are_refused(cifar: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"No CIFAR-10 found: .*cifar-10-batches"):
        ImageDataModule(cifar / "none")
    (cifar / "data_batch_1.bin").write_bytes(b"\0" * 3074)
    with pytest.raises(MisconfigurationException, match=r"data_batch_1.bin.*records of 3073 bytes"):
        read_cifar10([cifar / "data_batch_1.bin"])
    (cifar / "data_batch_1.bin").write_bytes(b"\x0a" * 3073)
    with pytest.raises(MisconfigurationException, match="class, from 0 to 9"):
        read_cifar10([cifar / "data_batch_1.bin"])


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        MisconfigurationException, match=r"pip install 'lightning-axosparse\[images"
    ):
        digits()
