"""Objects of two packages, and Fabric, end in an error."""

from __future__ import annotations

import lightning as L
import pytest
import pytorch_lightning as other
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn

from lightning_axosparse import AxoSparseStrategy, GradualPruning, sparsify

OPTIONS = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
WORDS = "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("axosparse", "invalid strategy name: `strategy='axosparse'`"),
        (AxoSparseStrategy(g_inter=2), r"is for lightning\.pytorch\.Trainer .*nor Fabric takes it"),
    ],
)
@pytest.mark.parametrize("kind", [L.Fabric, other.Trainer])
def test_fabric_and_trainers_of_the_other_package_are_refused(kind, strategy, words):
    with pytest.raises(ValueError, match=words):
        kind(accelerator="cpu", devices=1, strategy=strategy)


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


def test_a_callback_in_a_trainer_of_the_other_package_is_told_what_to_import():
    trainer = other.Trainer(callbacks=[GradualPruning(0.8)], **OPTIONS)
    with pytest.raises(MisconfigurationException, match=WORDS):
        trainer.fit(Module())


@pytest.mark.parametrize(
    ("module", "words"),
    [(Module, "must be a `LightningModule`"), (other.LightningModule, "single import style")],
)
@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_a_module_of_the_other_package_is_refused(call, module, words):
    trainer = L.Trainer(strategy=AxoSparseStrategy(), **OPTIONS)
    with pytest.raises(TypeError, match=words):
        getattr(trainer, call)(module())
