"""Loads text as bytes, and small images with their classes, in three parts each."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_axosparse.support.arguments import (
    BYTES,
    COUNT,
    INDEX,
    NONE,
    PATH,
    SEED,
    checked,
    number,
)
from lightning_axosparse.support.troubleshooting import see

VOCABULARY = 256
"""Vocabulary of a model trained on bytes."""

# Folders of Python's library that are not its sources: installed packages, tests, tables.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a text, in order, each with the next byte of each of its bytes.

    Args:
        text: the bytes, uint8, shape (n,).
        context: bytes per window.
        at_most: largest number of windows, evenly spread over the text; None: all.
    """

    def __init__(self, text: Tensor, context: int, at_most: int | None = None) -> None:
        self.text = text
        self.context = context
        self.fitting = (len(text) - 1) // context
        self.size = self.fitting if at_most is None else min(at_most, self.fitting)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the window's bytes and their next bytes: two int64 tensors of shape (context,)."""
        start = index * self.fitting // self.size * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class EpochShuffle(Sampler[int]):
    """Shuffles in an order that depends only on the seed and the epoch.

    So every rank and every resumed run has the same order, whatever other random numbers were
    drawn. Lightning calls :meth:`set_epoch`.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())


class SplitDataModule(L.LightningDataModule):
    """Data that are split into training, validation and test; subclasses set these in ``setup``.

    Args:
        batch_size: samples per batch.
        seed: seed of the order of the training samples.
        num_workers: number of processes that load batches.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any]

    def __init__(self, batch_size: int, seed: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size, self.seed, self.num_workers = batch_size, seed, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """Load the training data, shuffled anew each epoch, without an incomplete last batch."""
        order = EpochShuffle(len(cast(Sized, self.train)), self.seed)
        return self._loader(self.train, sampler=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Load the validation data in order."""
        return self._loader(self.validation)

    def test_dataloader(self) -> DataLoader[Any]:
        """Load the test data in order."""
        return self._loader(self.test)

    def _loader(
        self, data: Dataset[Any], sampler: Sampler[int] | None = None, drop_last: bool = False
    ) -> DataLoader[Any]:
        return DataLoader(
            data,
            self.batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


class TextDataModule(SplitDataModule):
    """A text as bytes, split into contiguous parts for training, validation and test.

    A batch is ``(bytes, next_bytes)``, both int64 of shape (batch_size, context).

    Args:
        path: a file, a folder (all its files, sorted) or a glob. None: the sources of Python's
            standard library, which every machine has.
        context: bytes per window.
        batch_size: windows per batch.
        held_out: fraction of the text for validation, and the same again for test.
        max_held_out: largest number of windows for validation and for test, evenly spread.
        max_bytes: largest number of bytes to read.
        seed: seed of the order of the training windows.
        num_workers: number of processes that load batches.

    Raises:
        MisconfigurationException: if an argument is out of range, ``path`` matches no file, or
            there is too little text.
    """

    @checked(
        MisconfigurationException,
        path=PATH | NONE,
        context=COUNT,
        batch_size=COUNT,
        held_out=number("a number between 0 and 0.5", lambda part: 0 < part < 0.5),
        max_held_out=COUNT | NONE,
        max_bytes=BYTES | NONE,
        seed=SEED,
        num_workers=INDEX,
    )
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        context: int = 128,
        batch_size: int = 32,
        held_out: float = 0.05,
        max_held_out: int | None = None,
        max_bytes: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.path, self.context = path, context
        self.held_out, self.max_held_out, self.max_bytes = held_out, max_held_out, max_bytes
        size = sum(file.stat().st_size for file in text_files(path))
        self._held_out_bytes(size if max_bytes is None else min(size, max_bytes))

    def setup(self, stage: str) -> None:
        """Read the text and split it: its end is for validation and test."""
        text = read_text(text_files(self.path), self.max_bytes)
        held_out = self._held_out_bytes(len(text))
        self.train = Windows(text[: -2 * held_out], self.context)
        validation, test = text[-2 * held_out : -held_out], text[-held_out:]
        self.validation = Windows(validation, self.context, self.max_held_out)
        self.test = Windows(test, self.context, self.max_held_out)

    def _held_out_bytes(self, size: int) -> int:
        """Return the bytes for validation, and again for test, of a text of ``size`` bytes."""
        held_out, needed = int(size * self.held_out), self.context + 1
        if held_out < needed:
            raise MisconfigurationException(
                f"Too little text: of {size} bytes, held_out={self.held_out} leaves "
                f"{held_out} for validation, but one window of context={self.context} takes "
                f"{needed}. Give more text, a smaller context or a larger held_out."
                + see("examples")
            )
        return held_out

    def train_dataloader(self) -> DataLoader[Any]:
        """Load the training windows, shuffled anew each epoch, without an incomplete last batch."""
        windows = len(cast(Sized, self.train))
        if windows < self.batch_size:
            raise MisconfigurationException(
                f"Too little text: {windows} training windows of context={self.context} do not "
                f"fill one batch of batch_size={self.batch_size}." + see("examples")
            )
        return super().train_dataloader()


def text_files(path: str | os.PathLike[str] | None) -> list[Path]:
    """Return the files that ``path`` matches, sorted; for None the standard library's sources.

    Raises:
        MisconfigurationException: if no file matches.
    """
    named = Path(standard_library() if path is None else path).expanduser()
    if path is None:
        files = [file for file in _sources(named) if file.suffix == ".py"]
    elif named.is_dir():
        files = [file for file in named.rglob("*") if file.is_file()]
    elif named.is_file():
        files = [named]
    else:
        matches = glob.glob(str(named), recursive=True)
        files = [Path(match) for match in matches if Path(match).is_file()]
    if not files:
        missing = named if path is None else os.fspath(path)
        raise MisconfigurationException(
            f"No text found: {str(missing)!r} names no file (seen from {str(Path.cwd())!r}). "
            "Give `path` an existing file, folder or glob." + see("examples")
        )
    return sorted(files)


def standard_library() -> Path:
    """Return the folder of the standard library's sources."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(files: list[Path], max_bytes: int | None = None) -> Tensor:
    """Read and concatenate the files, at most ``max_bytes`` bytes: uint8 of shape (n,)."""
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if max_bytes is not None and len(text) >= max_bytes:
            del text[max_bytes:]
            break
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(parent) / name for name in names)


Images = tuple[Tensor, Tensor]
"""Float32 (images, channels, height, width) in [-1, 1], and their classes, int64 (images,)."""

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
"""Bytes of an image of CIFAR-10: its class, and its red, green and blue pixels."""


class ImageDataModule(SplitDataModule):
    """Images with their classes, split into training, validation and test.

    A batch is ``(images, classes)``: float32 (batch_size, channels, height, width) in [-1, 1], and
    int64 (batch_size,).

    Args:
        path: a folder with the files of CIFAR-10's binary version (``data_batch_1.bin`` ...,
            ``test_batch.bin``); None: the 1797 digits of 8 x 8 pixels that come with scikit-learn,
            of which a part is for test.
        batch_size: images per batch.
        held_out: fraction of the images for validation, and of the digits the same again for test.
        seed: seed of the order of the training images.
        num_workers: number of processes that load batches.

    Raises:
        MisconfigurationException: if an argument is out of range, the files are not there, or
            scikit-learn is not installed.
    """

    @checked(
        MisconfigurationException,
        path=PATH | NONE,
        batch_size=COUNT,
        held_out=number("a number between 0 and 0.5", lambda part: 0 < part < 0.5),
        seed=SEED,
        num_workers=INDEX,
    )
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        batch_size: int = 64,
        held_out: float = 0.15,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.path, self.held_out = path, held_out
        if path is not None:
            cifar10_files(path)

    def setup(self, stage: str) -> None:
        """Read the images and split them, always alike."""
        if self.path is None:
            images = digits()
            rest, test = _split(images, int(self.held_out * len(images[1])))
        else:
            files, last = cifar10_files(self.path)
            rest, test = read_cifar10(files), read_cifar10([last])
        train, validation = _split(rest, int(self.held_out * len(rest[1])))
        self.train, self.validation, self.test = (
            TensorDataset(*part) for part in (train, validation, test)
        )


def digits() -> Images:
    """Return the digits of scikit-learn, one channel of 8 x 8 pixels, in an order without meaning.

    Raises:
        MisconfigurationException: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MisconfigurationException(
            "The digits come with scikit-learn: pip install 'lightning-axosparse[images]', or give "
            "`path` a folder with CIFAR-10's binary files." + see("examples")
        ) from error
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 8 - 1
    return images[order], torch.from_numpy(found.target).long()[order]


def cifar10_files(path: str | os.PathLike[str]) -> tuple[list[Path], Path]:
    """Return the files of CIFAR-10's binary version in a folder: those for training, that for test.

    Raises:
        MisconfigurationException: if they are not there.
    """
    folder = Path(path).expanduser()
    train, test = sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin"
    if not train or not test.is_file():
        raise MisconfigurationException(
            f"No CIFAR-10 found: '{folder}' has no data_batch_1.bin ... and test_batch.bin. Give "
            "`path` the folder of its binary version, cifar-10-batches-bin." + see("examples")
        )
    return train, test


def read_cifar10(files: list[Path]) -> Images:
    """Read files of CIFAR-10's binary version.

    Raises:
        MisconfigurationException: if a file is not a whole number of images with their classes.
    """
    parts = []
    for file in files:
        content = np.fromfile(file, np.uint8)
        if len(content) % _RECORD or (content[::_RECORD] > 9).any():
            raise MisconfigurationException(
                f"'{file}' is not a file of CIFAR-10's binary version: records of {_RECORD} bytes, "
                "the first of which is the class, from 0 to 9. Copy it again." + see("examples")
            )
        parts.append(torch.from_numpy(content).view(-1, _RECORD))
    records = torch.cat(parts)
    images = records[:, 1:].reshape(-1, *_SHAPE).float() / 127.5 - 1
    return images, records[:, 0].long()


def _split(images: Images, last: int) -> tuple[Images, Images]:
    """Split off the ``last`` images."""
    pixels, classes = images
    at = len(classes) - last
    return (pixels[:at], classes[:at]), (pixels[at:], classes[at:])
