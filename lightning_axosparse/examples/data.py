"""Data modules: text as bytes, and small images with their classes."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_axosparse.support.arguments import (
    COUNT,
    INDEX,
    NONE,
    PATH,
    SEED,
    checked,
    integer,
    number,
)
from lightning_axosparse.support.troubleshooting import see

VOCABULARY = 256
"""Vocabulary of a model trained on bytes."""

HELD_OUT = number("a number between 0 and 0.5", lambda part: 0 < part < 0.5)

# Folders of Python's library with other files than its sources.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a text, in order, each with the next byte of each of its bytes.

    For the text "abcdefg" and a context of 3, the windows are ("abc", "bcd") and ("def", "efg").

    Args:
        text: the bytes, uint8, shape (n,).
        context: bytes per window.
        max_windows: largest number of windows, evenly spread over the text; None: all.
    """

    def __init__(self, text: Tensor, context: int, max_windows: int | None = None) -> None:
        self.text = text
        self.context = context
        self.available = (len(text) - 1) // context
        self.size = self.available if max_windows is None else min(max_windows, self.available)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the window's bytes and their next bytes: two int64 tensors of shape (context,)."""
        start = index * self.available // self.size * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class EpochShuffle(Sampler[int]):
    """Shuffles in an order that depends only on the seed and the epoch.

    So every rank and every resumed run has the same order, independently of other random numbers.
    Lightning calls :meth:`set_epoch`.
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
    """Data for training, validation and test, which subclasses set in ``setup``.

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
        held_out: fraction of the text for validation, and the same fraction for test.
        max_held_out: largest number of windows for validation, and for test, evenly spread.
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
        held_out=HELD_OUT,
        max_held_out=COUNT | NONE,
        max_bytes=integer(1, 2**63 - 1) | NONE,
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
        """Return the number of bytes for validation, and for test, of a text of ``size`` bytes."""
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
    """Return the files that ``path`` matches, sorted; for None the standard library's sources."""
    named = Path(standard_library() if path is None else path).expanduser()
    if path is None:
        files = []
        for parent, folders, names in os.walk(named):
            folders[:] = [name for name in folders if name not in _SKIPPED]
            files += [Path(parent) / name for name in names if name.endswith(".py")]
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


class ImageDataModule(SplitDataModule):
    """The 1797 digits of scikit-learn, split into the same training, validation and test each time.

    A batch is ``(images, classes)``: float32 (batch_size, 1, 8, 8) in [-1, 1], and int64
    (batch_size,).

    Args:
        batch_size: images per batch.
        held_out: fraction of the images for test, and the same fraction of the rest for validation.
        seed: seed of the order of the training images.
        num_workers: number of processes that load batches.

    Raises:
        MisconfigurationException: if an argument is out of range, or scikit-learn is not installed.
    """

    @checked(
        MisconfigurationException,
        batch_size=COUNT,
        held_out=HELD_OUT,
        seed=SEED,
        num_workers=INDEX,
    )
    def __init__(
        self, batch_size: int = 64, held_out: float = 0.15, seed: int = 0, num_workers: int = 0
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.held_out = held_out

    def setup(self, stage: str) -> None:
        """Read the images and split them."""
        images, classes = digits()
        test = int(self.held_out * len(classes))
        validation = int(self.held_out * (len(classes) - test))
        sizes = [len(classes) - test - validation, validation, test]
        parts = zip(images.split(sizes), classes.split(sizes), strict=True)
        self.train, self.validation, self.test = (TensorDataset(*part) for part in parts)


def digits() -> tuple[Tensor, Tensor]:
    """Return the digits of scikit-learn, shuffled, and their classes.

    These are float32 (images, 1, 8, 8) in [-1, 1] and int64 (images,).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MisconfigurationException(
            "The digits come with scikit-learn: pip install scikit-learn." + see("examples")
        ) from error
    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(loaded.images).float().unsqueeze(1) / 8 - 1
    return images[order], torch.from_numpy(loaded.target).long()[order]
