"""What micro-batches print is printed once, as on one process."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("before", batch_idx, sep="-")
        loss = super().training_step(batch, batch_idx)
        self.print("behind", end="!\n")
        if self.accuracy.update_count == 2 and batch_idx == 0:
            self.print("second")
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("predicts", flush=True)
        return super().predict_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.print("epoch")


def printed(strategy: Any, ranks: int = 1, module: type[Net] = Printing) -> list[str]:
    out = io.StringIO()
    with redirect_stdout(out):
        run, net = trainer(strategy, ranks, max_epochs=1), module()
        run.fit(net, loader(1, batches=2))
        run.predict(net, loader(1, batches=1), return_predictions=False)
    kinds = "before", "behind", "second", "predicts", "epoch"
    return [line for line in out.getvalue().splitlines() if line.startswith(kinds)]


def pipeline(**options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, 4, pipeline="model", **options)


EXPECTED = ["before-0", "behind!", "second", "before-1", "behind!", "epoch", "predicts"]


def test_it_prints_what_one_process_prints() -> None:
    assert printed("auto") == [line for line in EXPECTED if line != "second"]
    assert printed(pipeline(transport="loopback")) == EXPECTED


def on_ranks() -> list[str]:
    return printed(pipeline(), 2)


def test_the_first_rank_prints_for_all() -> None:
    assert run_ranks(2, on_ranks) == [EXPECTED, []]


class Failing(Printing):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        raise OverflowError


def test_what_was_printed_before_an_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OverflowError):
        trainer(pipeline(transport="loopback")).fit(Failing(), loader(1))
    assert capsys.readouterr().out.endswith("before-0\nbehind!\n")


class ToFile(Printing):
    file: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("behind", file=self.file)
        return super().training_step(batch, batch_idx)


def test_standard_streams_alone_are_known_to_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def fit(file: Any) -> None:
        module = ToFile()
        module.file = file
        run = trainer(pipeline(transport="loopback"), max_epochs=1)
        run.fit(module, loader(1, batches=1))

    fit(sys.stderr)
    assert capsys.readouterr().err.count("behind\n") == 1
    with pytest.raises(MisconfigurationException, match=r"sends no files: use sys\.stdout"):
        fit(io.StringIO())
