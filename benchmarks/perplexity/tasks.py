"""The models, texts and lengths of training that arms are compared on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from lightning_axosparse.examples.data import TextDataModule, Windows, read_text
from lightning_axosparse.examples.data import text_files as files_of
from lightning_axosparse.examples.gpt import GPT

Text = Literal["example", "files", "folder"]


@dataclass(frozen=True)
class Texts:
    """What a network is trained on, chosen by and reported on, in windows."""

    train: Windows
    validation: Windows
    test: Windows


@dataclass(frozen=True)
class Task:
    """A network, a text and a length of training; AdamW, warm-up and cosine are the example GPT's.

    Attributes:
        name: of the task in tables.
        text: "example": the standard library, cut and ordered as by ``make train``; "files": the
            same, one file in twenty for validation and another for test; "folder": the files of a
            folder, the last for test, a twentieth of the others' text for validation.
        width: of the residual stream.
        depth: transformer blocks.
        heads: of each block.
        context: bytes in a window.
        batch_size: windows in a batch.
        epochs: epochs of ``steps`` steps; each begins a new order of the windows.
        steps: optimizer steps of an epoch.
        held_out: most windows for validation, and for test, evenly spread.
        clip: the norm that gradients are clipped to.
        most_bytes: of the text that is trained on; None: all.
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
    held_out: int = 1024
    clip: float = 1.0
    most_bytes: int | None = None

    @property
    def all_steps(self) -> int:
        return self.epochs * self.steps

    @property
    def tokens(self) -> int:
        """The bytes that the network sees in training."""
        return self.all_steps * self.batch_size * self.context

    def model(self, rate: float, weight_decay: float = 0.1, dropout: float = 0.0) -> GPT:
        return GPT(
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            context=self.context,
            dropout=dropout,
            learning_rate=rate,
            weight_decay=weight_decay,
        )

    def texts(self, folder: Path | None) -> Texts:
        """Read the text.

        Args:
            folder: of ``text="folder"``.
        """
        if self.text == "example":
            data = TextDataModule(
                context=self.context, batch_size=self.batch_size, max_held_out=self.held_out
            )
            data.setup("fit")
            return Texts(data.train, data.validation, data.test)
        if self.text == "files":
            train, validation, test = split_by_file(files_of(None))
        elif folder is None:
            raise ValueError(f"{self.name} trains on a folder of text: give --folder FOLDER.")
        else:
            train, validation, test = split_by_folder(folder)
        return Texts(
            Windows(train[: self.most_bytes], self.context),
            Windows(validation, self.context, self.held_out),
            Windows(test, self.context, self.held_out),
        )


MAIN = Task("MAIN", "example", width=192, depth=6, heads=6, held_out=256)
SMALL = Task("SMALL", "files")
LONG = Task("LONG", "files", steps=192)
WIKI = Task("WIKI", "folder")

LIBRARY = Task("LIBRARY", "files", width=64, epochs=1, steps=4352)
"""Twenty tokens per parameter: .22 M parameters, 4.5 M tokens, each seen once."""

ENGLISH = Task("ENGLISH", "folder", width=64, epochs=4, steps=1088)
LARGER = Task("LIBRARY .8M", "files", width=128, epochs=2, steps=8192)
REPEATED = Task("REPEATED", "folder", width=64, epochs=32, steps=98, most_bytes=100_417)
"""Much over little: 32 epochs of .1 MB, .46 of its bytes a parameter."""


def shaped(task: Task, width: int, depth: int) -> Task:
    """Return a task with a network of another shape."""
    return replace(task, name=f"{task.name} {width}x{depth}", width=width, depth=depth)


def lasting(task: Task, steps: int) -> Task:
    """Return a task of one epoch with another number of steps."""
    return replace(task, name=f"{task.name}, {steps} steps", steps=steps)


def split_by_file(files: list[Path]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the texts for training, validation and test: of every twenty files 18, 1 and 1."""
    return (
        read_text([file for place, file in enumerate(files) if place % 20 not in (0, 10)]),
        read_text(files[0::20]),
        read_text(files[10::20]),
    )


def split_by_folder(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return the texts for training, validation and test from a folder's files, by name."""
    files = files_of(folder)
    if len(files) < 2:
        raise ValueError(f"'{folder}' has {len(files)} file, but the last of them is for test.")
    text, test = read_text(files[:-1]), read_text(files[-1:])
    cut = len(text) * 19 // 20
    return text[:cut], text[cut:], test
