"""Loads small images with their classes: scikit-learn's digits, or CIFAR-10 from its files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_axosparse.examples.text import SplitDataModule
from lightning_axosparse.support.arguments import COUNT, INDEX, NONE, PATH, SEED, checked, number
from lightning_axosparse.support.troubleshooting import see

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
