"""Messages beside progress bars, as a terminal shows them."""

from __future__ import annotations

import logging
import sys
import warnings
from io import StringIO

import lightning as L
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_utilities.core import rank_zero
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.support.messages import rank_zero_info, rank_zero_warn


def log_with(handler: logging.Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this handler alone write what Lightning logs."""
    monkeypatch.setattr(rank_zero.log, "handlers", [handler])
    monkeypatch.setattr(rank_zero.log, "propagate", False)
    monkeypatch.setattr(rank_zero.log, "level", logging.INFO)


def shown(written: str) -> list[str]:
    """The lines of a terminal: a carriage return lets the next characters replace the line's."""
    lines = []
    for line in written.split("\n"):
        row = ""
        for part in line.split("\r"):
            row = part + row[len(part) :]
        lines.append(row.rstrip())
    return lines


def test_a_message_has_a_line_of_its_own_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, handler = StringIO(), logging.StreamHandler()
    monkeypatch.setattr(sys, "stdout", terminal)
    log_with(handler, monkeypatch)
    before = handler.stream
    with tqdm(total=3, file=sys.stdout, desc="Epoch 0") as bar:
        bar.update()
        rank_zero_info("first")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", _shows)
            rank_zero_warn("second")
    assert handler.stream is before
    assert sys.stderr is not terminal
    *lines, bar_line, end = shown(terminal.getvalue())
    assert lines == ["first", "second from test_messages.py"]
    assert bar_line.startswith("Epoch 0")
    assert end == ""


def _shows(message: Warning | str, category: type, filename: str, *_: object) -> None:
    print(message, "from", filename.rpartition("/")[2], file=sys.stderr)


def test_a_message_is_shown_though_the_log_began_in_a_file_that_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = StringIO()
    handler = logging.StreamHandler(closed)
    closed.close()
    log_with(handler, monkeypatch)
    rank_zero_info("first")
    assert capsys.readouterr().err == "first\n"
    assert handler.stream is closed


def test_a_message_is_above_the_bar_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, handler = StringIO(), logging.StreamHandler()
    log_with(handler, monkeypatch)
    console = Console(file=terminal, force_terminal=True, width=80)
    with Progress(console=console, auto_refresh=False) as progress:
        progress.add_task("Epoch 0", total=3)
        rank_zero_info("first")
    assert "first" in terminal.getvalue()


def test_a_run_writes_no_message_into_its_bar(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_with(logging.StreamHandler(), monkeypatch)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[TQDMProgressBar()],
        strategy=AxoSparseStrategy(g_inter=2, transport="loopback"),
    )
    data = TextDataModule(context=8, batch_size=8, max_bytes=2_000, max_held_out=8)
    trainer.fit(GPT(width=8, depth=2, heads=2, context=8), datamodule=data)
    lines = shown(capfd.readouterr().out)
    assert any("Epoch 0" in line for line in lines)
    ours = ("Micro-batches of train", "At most 4 micro-batches", "Micro-batches of val")
    for beginning in (*ours, "`Trainer.fit` stopped"):
        (line,) = [line for line in lines if beginning in line]
        assert line.startswith(beginning)
        assert line.endswith(".")
