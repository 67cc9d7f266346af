"""What a run says without being asked: one line at its start, and one when the ticket is drawn."""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path

import lightning as L
import pytest
from lightning_utilities.core import rank_zero

from lightning_axosparse import AxoSparseStrategy, GradualPruning
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT
from tests.ranks import PATIENCE, warm_python

OF_LIGHTNING = re.compile(
    r"GPU available|TPU available|Tip: |Loading `train_dataloader`|is deprecated, use"
    r"|sync_dist=True|`DistributedSampler`|`Trainer.fit` stopped|<frozen runpy>|\bsrun\b"
)
START = (
    r"2 stages( x 2 replicas)?: layers 'model\.0' to 'model\.5' in 3 \+ 3, the largest stage with "
    r"1\.\d\d times the mean stage's parameters; [\d.]+ GB of memory free\."
)
DRAW = r"Ticket drawn after 14 steps: 80\.0% of the 58,368 entries of 18 weights are pruned\."


def run(devices: int, **options: object) -> None:
    """Fit, and validate twice."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        limit_train_batches=8,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # Numbers of layers, as otherwise measured times may call for advice on the partition.
        strategy=AxoSparseStrategy(g_inter=2, balance=[3, 3], **options),
        callbacks=[GradualPruning(0.8)],
    )
    model = GPT(width=32, depth=4, heads=2, context=32)
    data = TextDataModule(context=32, batch_size=8, max_held_out=16, max_bytes=100_000)
    trainer.fit(model, datamodule=data)
    for _ in range(2):
        trainer.validate(model, datamodule=data, verbose=False)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_say_two_lines_in_a_fit_and_none_in_validation(devices: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tests.strategy.test_said import run\n"
        f"if __name__ == '__main__':\n    run({devices})\n"
    )
    done = subprocess.run(
        [*warm_python(), str(script)],
        check=True,
        cwd=tmp_path,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = [line for line in lines if not OF_LIGHTNING.search(line)]
    assert len(said) == 2, said
    assert any("sync_dist=True" in line for line in lines) == (devices > 2)  # Replicas differ.
    assert re.fullmatch(START, said[0])
    assert re.fullmatch(DRAW, said[1])


def test_the_rest_is_for_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    said: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda r: said.append((r.levelno, r.getMessage()))  # type: ignore[method-assign]
    logger = rank_zero.log  # of whichever Lightning package was imported last
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG, logger.name):
            run(1, transport="loopback")
    finally:
        logger.removeHandler(handler)
    unasked = [line for level, line in said if level > logging.DEBUG]
    ours = [line for line in unasked if not OF_LIGHTNING.search(line)]
    assert [bool(re.fullmatch(START, ours[0])), bool(re.fullmatch(DRAW, ours[1]))] == [True, True]
    assert len(ours) == 2
    asked = [line for level, line in said if level == logging.DEBUG]
    for start, times in {"Micro-batches of ": 4, "At most ": 2, "2 stages: layers": 2}.items():
        assert sum(line.startswith(start) for line in asked) == times, start
