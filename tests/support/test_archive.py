from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_axosparse import CorruptFileError
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import DeferredTensor, all_computed, load_mapped

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
shapes = st.lists(st.integers(0, 4), max_size=3)


def give(tensor: Tensor) -> Tensor:
    return tensor


def deferred(key: str, tensor: Tensor) -> DeferredTensor:
    return DeferredTensor(key, tensor.shape, tensor.dtype, partial(give, tensor))


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4))
def test_the_file_has_the_bytes_of_that_of_the_tensors(
    tmp_path_factory, kinds: list[tuple[list[int], torch.dtype]]
) -> None:
    plain = {str(i): torch.randn(shape).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
    later = {key: deferred(key, tensor) for key, tensor in plain.items()}
    paths = [tmp_path_factory.getbasetemp() / name / "a.pt" for name in ("plain", "later")]
    for path, tensors in zip(paths, (plain, later), strict=True):
        path.parent.mkdir(exist_ok=True)
        archive.save({"epoch": 1, **tensors, "tied": tensors["0"]}, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = torch.load(paths[1], weights_only=True)
    for key, tensor in plain.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor)


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    view = torch.arange(10_000.0).view(100, 100)[:, 3]
    archive.save({"view": deferred("view", view)}, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["view"], view)
    assert (tmp_path / "a.pt").stat().st_size < 3000


def test_a_tensor_that_is_there_twice_is_made_once() -> None:
    one = deferred("one", torch.ones(2, 3))
    assert (one.shape, one.dtype, one.is_meta) == ((2, 3), torch.float32, True)
    made = all_computed({"a": one, "b": [one, 5]})
    assert made["a"] is made["b"][0]
    assert torch.equal(made["a"], torch.ones(2, 3))
    assert made["b"][1] == 5


CONTENT = {"weight": torch.arange(5000.0), "step": 3}


@pytest.mark.parametrize("save", [archive.save, torch.save])
def test_every_change_of_a_tensor_is_found(save, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save(CONTENT, path)
    archive.verify(path)
    assert torch.equal(torch.load(path)["weight"], CONTENT["weight"])
    whole = path.read_bytes()
    place = whole.index(CONTENT["weight"].numpy().tobytes())
    for at in (place, place + 10_000, place + 19_999):
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptFileError, match=f"{path}' cannot be read"):
            archive.verify(path)


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


def test_a_record_that_is_marked_as_a_folder_is_damaged(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "file.pt")
    content = bytearray((tmp_path / "file.pt").read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))
    content[entry + 38] |= 0x10  # The external attributes: torch would read no bytes.
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CorruptFileError, match="a record is a folder"):
        archive.verify(tmp_path / "file.pt")
