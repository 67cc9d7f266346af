"""A file's weights are read where they are used, with the values that torch.load returns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse.checkpoint.mapped_file import load_mapped
from lightning_axosparse.support.files import archive


class Holder:
    """An object that unpickles with a tensor in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def content() -> dict[str, Any]:
    weight = torch.arange(4000.0).view(40, 100)
    return {
        "epoch": 3,
        "state_dict": {
            "weight": weight,
            "tied": weight,
            "view": weight[3:, 7:].t(),
            "half": torch.randn(999).bfloat16(),
            "mask": torch.rand(4000) < 0.5,
            "small": torch.tensor(7),
            "empty": torch.empty(0, 3),
        },
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight + 1}}}],
        "callbacks": {"mine": {"average": weight * 2}},
        "lr_schedulers": [{"milestones": Counter([2, 3]), "factor": np.float64(0.5)}],
    }


@pytest.mark.parametrize("save", [archive.save, torch.save])
def test_values_and_ties_are_those_of_the_file(save: Any, tmp_path: Path) -> None:
    expected, path = content(), tmp_path / "a.ckpt"
    save(expected, path)
    found = load_mapped(path, weights_only=False)
    state = found["state_dict"]
    assert state["weight"] is state["tied"]
    assert type(found["callbacks"]["mine"]["average"]) is Tensor
    path.rename(tmp_path / "older.ckpt")
    torch.save({}, path)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found["state_dict"]["view"].stride() == expected["state_dict"]["view"].stride()


def test_a_change_of_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(content(), path)
    before = path.read_bytes()
    made = load_mapped(path, weights_only=False)
    made["state_dict"]["weight"].zero_()
    made["callbacks"]["mine"]["average"].zero_()
    assert made["state_dict"]["tied"].count_nonzero() == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        lambda weight: Holder(weight),
        lambda weight: nn.Parameter(weight),
        lambda weight: weight.to_sparse(),
        lambda weight: {"inside": Holder(weight)},
    ],
)
def test_tensors_in_other_objects_have_their_values(other: Any, tmp_path: Path) -> None:
    expected, path = content(), tmp_path / "a.ckpt"
    torch.save({**expected, "other": other(expected["state_dict"]["weight"])}, path)
    found = load_mapped(path, weights_only=False)
    kept = found.pop("other")
    kept = kept["inside"] if isinstance(kept, dict) else kept
    values = kept.tensor if isinstance(kept, Holder) else kept
    assert torch.equal(values.to_dense(), expected["state_dict"]["weight"])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_is_not_used_is_not_read(tmp_path: Path) -> None:
    path, names = tmp_path / "a.ckpt", [str(index) for index in range(8)]
    torch.save({"state_dict": {name: torch.ones(1 << 20) for name in names}}, path)
    before = _resident()
    tensors = load_mapped(path, weights_only=True)["state_dict"]
    assert tensors["3"].sum() == 1 << 20
    assert _resident() - before < 2 * (4 << 20), "one of eight tensors of 4 MiB was used"


def _resident() -> int:
    """Bytes of files and of shared memory that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssFile"))
