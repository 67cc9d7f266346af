"""Both names of Lightning find one set of modules, in each order of imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import PATIENCE

COMPARE = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    exec(sys.argv[1])
import lightning, lightning.pytorch.callbacks, lightning.fabric.utilities
import pytorch_lightning.callbacks, lightning_fabric.utilities
from lightning.pytorch.trainer.states import TrainerFn
from pytorch_lightning.trainer import states
print(json.dumps({
    "one": [
        pytorch_lightning is lightning.pytorch,
        pytorch_lightning.callbacks is lightning.pytorch.callbacks,
        lightning_fabric.utilities is lightning.fabric.utilities,
        lightning.Trainer is pytorch_lightning.Trainer,
        states.TrainerFn is TrainerFn,
    ],
    "has": pytorch_lightning.__name__,
    "spec": pytorch_lightning.callbacks.__spec__.name,
    "name": pytorch_lightning.callbacks.__name__,
    "said": [str(each.message) for each in said if "two names" in str(each.message)],
}))
"""
OURS = "import lightning_axosparse"


def compared(imports: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE, imports],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("imports", "has"),
    [
        pytest.param(OURS, "lightning.pytorch", marks=pytest.mark.slow),
        pytest.param(f"import lightning; {OURS}", "lightning.pytorch", marks=pytest.mark.slow),
        (f"import pytorch_lightning; {OURS}", "pytorch_lightning"),
    ],
)
def test_the_name_that_was_imported_first_has_the_modules(imports: str, has: str) -> None:
    found = compared(imports)
    assert found["one"] == [True] * 5
    assert (found["has"], found["name"], found["spec"]) == (
        has,
        f"{has}.callbacks",
        f"{has}.callbacks",
    )
    assert found["said"] == []


def test_two_sets_are_said_in_one_line() -> None:
    found = compared(f"import lightning.pytorch, pytorch_lightning; {OURS}")
    assert found["one"] == [False] * 5
    assert len(found["said"]) == 1
    assert "both were imported before lightning_axosparse. Import it first" in str(found["said"])


TRAIN = """
import sys
{imports}
import pytorch_lightning as pl
import torch
from lightning_axosparse import AxoSparseStrategy, GradualPruning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(devices, strategy):
    pl.seed_everything(0)
    x = torch.randn(32, 8)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)
    saved = pl.callbacks.ModelCheckpoint(
        "{folder}", "last", every_n_train_steps=1, enable_version_counter=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=3,
        strategy=strategy,
        callbacks=[GradualPruning(0.5), saved],
        logger=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, data)
    again = Module.load_from_checkpoint("{folder}/last.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters()))
    assert (module.layers[0].weight == 0).float().mean() > 0.2
    assert isinstance(trainer.callback_metrics["loss"], torch.Tensor)
    return [parameter.detach() for parameter in module.parameters()]


if __name__ == "__main__":
    one = train(1, "axosparse")
    loopback = train(1, AxoSparseStrategy(g_inter=2, transport="loopback"))
    ranks = train(2, AxoSparseStrategy(g_inter=2))
    for other in (loopback, ranks):
        for a, b in zip(one, other):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
"""


@pytest.mark.parametrize(
    "imports", [pytest.param(OURS, marks=pytest.mark.slow), "import pytorch_lightning"]
)
def test_modules_and_trainers_of_the_other_name_train_on_ranks(
    imports: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(imports=imports, folder=tmp_path))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
