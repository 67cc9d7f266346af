"""The models, texts and lengths of training that arms are compared on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.examples.text import EpochShuffle, TextDataModule, Windows, read_text
from lightning_axosparse.examples.text import text_files as files_of

Text = Literal["example", "files", "english"]


@dataclass(frozen=True)
class Task:
    """What is trained, on what and how long; AdamW, warm-up and cosine are the example GPT's.

    Attributes:
        name: of the task in tables.
        text: "example": the standard library, cut and ordered as by ``make train``; "files": the
            same, one file in twenty for validation and another for test; "english": the first file
            of a folder, its last twentieth for validation, and the second for test.
        width: of the residual stream.
        depth: transformer blocks.
        heads: of each block.
        context: bytes in a window.
        batch_size: windows in a batch.
        epochs: epochs of ``steps`` steps.
        steps: optimizer steps of an epoch.
        learning_rate: after the warm-up.
        held_out: most windows for validation, and for test, evenly spread.
        clip: the norm that gradients are clipped to.
    """

    name: str
    text: Text
    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 64
    batch_size: int = 16
    epochs: int = 8
    steps: int = 64
    learning_rate: float = 3e-3
    held_out: int = 1024
    clip: float = 1.0

    @property
    def all_steps(self) -> int:
        return self.epochs * self.steps

    def model(self) -> GPT:
        return GPT(
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            context=self.context,
            learning_rate=self.learning_rate,
        )

    def data(self, seed: int, english: Path | None) -> L.LightningDataModule:
        """Return the text, in batches.

        Args:
            seed: of the order of the training windows.
            english: the folder of ``text="english"``.
        """
        if self.text == "example":
            return TextDataModule(
                context=self.context,
                batch_size=self.batch_size,
                max_held_out=self.held_out,
                seed=seed,
            )
        if self.text == "files":
            return SplitText(self, seed, *split_by_file(files_of(None)))
        if english is None:
            raise ValueError("The folder of the English text is missing: give --english FOLDER.")
        return SplitText(self, seed, *split_by_folder(english))


MAIN = Task("MAIN", "example", width=192, depth=6, heads=6, held_out=256)
SMALL = Task("SMALL", "files")
LONG = Task("LONG", "files", steps=192)
WIKI = Task("WIKI", "english")
QUICK = Task("QUICK", "files", width=64, context=32, steps=32, held_out=512)

DEEP = tuple(replace(SMALL, name=f"DEEP {depth}", depth=depth) for depth in (6, 12))
"""SMALL with more blocks."""


def shaped(width: int, depth: int, learning_rate: float = SMALL.learning_rate) -> Task:
    """Return SMALL with another model and rate."""
    name = f"SMALL {width}x{depth}, {learning_rate:g}"
    return replace(SMALL, name=name, width=width, depth=depth, learning_rate=learning_rate)


AS_LARGE = tuple(
    shaped(width, depth, rate)
    for width, depth in ((112, 1), (80, 2), (68, 3), (60, 4))
    for rate in (3e-3, 6e-3)
)
"""Dense models whose state is as large as that of SMALL's ticket, 3 MB."""

AS_LARGE_PRUNED = {
    shaped(128, 2): 0.61,
    shaped(128, 6): 0.866,
    shaped(192, 2): 0.823,
    shaped(192, 4): 0.911,
}
"""Models, and the fraction to prune that leaves them with as much."""

TASKS = {
    task.name: task for task in (MAIN, SMALL, LONG, WIKI, QUICK, *DEEP, *AS_LARGE, *AS_LARGE_PRUNED)
}


def split_by_file(files: list[Path]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the texts for training, validation and test: of every twenty files 18, 1 and 1."""
    return (
        read_text([file for place, file in enumerate(files) if place % 20 not in (0, 10)]),
        read_text(files[0::20]),
        read_text(files[10::20]),
    )


def split_by_folder(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return the texts for training, validation and test from a folder's two files, by name."""
    files = files_of(folder)
    if len(files) != 2:
        raise ValueError(f"'{folder}' must have two files, one to train on; it has {len(files)}.")
    text, test = read_text(files[:1]), read_text(files[1:])
    cut = len(text) * 19 // 20
    return text[:cut], text[cut:], test


class SplitText(L.LightningDataModule):
    """Texts for training, validation and test, uint8 each, in the batches of a task."""

    def __init__(
        self, task: Task, seed: int, train: Tensor, validation: Tensor, test: Tensor
    ) -> None:
        super().__init__()
        self.batch_size, self.seed = task.batch_size, seed
        self.train = Windows(train, task.context)
        self.validation = Windows(validation, task.context, task.held_out)
        self.test = Windows(test, task.context, task.held_out)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        order = EpochShuffle(len(self.train), self.seed)
        return DataLoader(self.train, self.batch_size, sampler=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.validation, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.test, self.batch_size)
