from __future__ import annotations

import subprocess
from pathlib import Path

import lightning as L
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.ranks import PATIENCE, warm_python

other = pytest.importorskip("pytorch_lightning")
boring = pytest.importorskip("pytorch_lightning.demos.boring_classes")

OPTIONS = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
WORDS = "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"
LATER = """
import lightning_axosparse
import pytorch_lightning
pytorch_lightning.Trainer(strategy="axosparse")
"""


class Module(boring.BoringModel):
    """A module of a user."""


def test_a_trainer_of_the_other_package_is_told_what_to_import():
    with pytest.raises(MisconfigurationException, match=WORDS):
        other.Trainer(strategy="axosparse", **OPTIONS)
    with pytest.raises(ValueError, match=r"import lightning\.pytorch as pl.*does not take it"):
        other.Trainer(strategy=AxoSparseStrategy(), **OPTIONS)
    trainer = other.Trainer(callbacks=[EarlyBirdTicket(0.8)], **OPTIONS)
    with pytest.raises(MisconfigurationException, match=WORDS):
        trainer.fit(Module())


def test_it_may_be_imported_later(tmp_path: Path):
    (tmp_path / "train.py").write_text(LATER)
    command = [*warm_python(), str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert WORDS in done.stderr


@pytest.mark.parametrize("module", [Module, other.LightningModule])
@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_a_module_of_the_other_package_is_told_what_to_import(call, module):
    trainer = L.Trainer(strategy=AxoSparseStrategy(), **OPTIONS)
    with pytest.raises(MisconfigurationException, match=WORDS):
        getattr(trainer, call)(module())


def test_what_is_no_module_is_refused_by_lightning():
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        L.Trainer(**OPTIONS).fit(nn.Linear(2, 2))
