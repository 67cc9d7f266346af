"""Lightning's own pruning where one process has all stages, with checkpoints and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, difference, fit, loaded, trainer

CASES: dict[str, dict[str, Any]] = {
    "rewound to the first weights": {},
    "masks in checkpoints": {
        "make_pruning_permanent": False,
        "use_lottery_ticket_hypothesis": False,
    },
    "each layer by itself": {
        "pruning_fn": "ln_structured",
        "use_global_unstructured": False,
        "pruning_dim": 0,
        "pruning_norm": 2,
    },
}


def train(case: str, folder: Path, strategy: Any, epoch: int | None = None) -> Record:
    L.seed_everything(0, verbose=False)
    options = {"pruning_fn": "l1_unstructured", "amount": 0.3, **CASES[case]}
    run = trainer(
        strategy,
        callbacks=[
            ModelPruning(parameter_names=["weight"], **options),
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
        ],
        enable_checkpointing=True,
        precision="64-true",
    )
    path = None if epoch is None else folder / f"epoch={epoch}.ckpt"
    return fit(run, Net(outer=True).double(), ckpt_path=path, weights_only=False)


@pytest.mark.parametrize("case", CASES)
def test_pruning_of_all_stages_in_one_process(case: str, tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    # Lightning resumes from no checkpoint that has the masks.
    for epoch in (None,) if "masks" in case else (None, 0):
        strategy = AxoSparseStrategy(2, 2, pipeline="model", transport="loopback")
        record, expected = train(case, ours, strategy, epoch), train(case, plain, "auto", epoch)
        assert difference(record, expected) <= 1e-12
    for epoch in range(3):
        mine, theirs = loaded(*(folder / f"epoch={epoch}.ckpt" for folder in (ours, plain)))
        assert mine["state_dict"].keys() == theirs["state_dict"].keys()
        torch.testing.assert_close(mine["state_dict"], theirs["state_dict"], rtol=1e-12, atol=1e-12)
        assert float((mine["state_dict"].get("model.2.weight", torch.zeros(1)) == 0).sum()) > 0
