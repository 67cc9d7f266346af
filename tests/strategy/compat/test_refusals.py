from __future__ import annotations

import subprocess
from pathlib import Path

import lightning as L
import pytest
import pytorch_lightning as other
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, sparsify
from tests.ranks import PATIENCE, warm_python

OPTIONS = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
WORDS = "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"
LATER = """
import lightning_axosparse
import pytorch_lightning
pytorch_lightning.Trainer(strategy="axosparse")
"""


@pytest.mark.parametrize("strategy", ["axosparse", AxoSparseStrategy(g_inter=2)])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_strategy_is_refused_with_what_works(strategy, devices):
    with pytest.raises(MisconfigurationException, match=r"^Fabric\(.*Write a LightningModule"):
        L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)


def test_what_is_no_strategy_is_refused_by_lightning():
    with pytest.raises(ValueError, match="You selected an invalid strategy name"):
        L.Fabric(accelerator="cpu", devices=1, strategy="axo")


def test_sparse_storage_trains_under_fabric_like_masked_dense_weights():
    torch.manual_seed(0)
    data = torch.randn(3, 8, 4)
    mask = torch.rand(4, 4) > 0.5

    def trained(sparse: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            model.weight *= mask
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if sparse:
            sparsify(model, {"weight": mask}, optimizer)
        fabric = L.Fabric(accelerator="cpu", devices=1)
        wrapped, stepped = fabric.setup(model, optimizer)
        for batch in data:
            stepped.zero_grad()
            fabric.backward(wrapped(batch).square().sum())
            if not sparse:
                model.weight.grad *= mask
            stepped.step()
        return model.weight.detach() * 1.0

    assert torch.allclose(trained(True), trained(False), rtol=0, atol=1e-6)


class Module(BoringModel):
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
