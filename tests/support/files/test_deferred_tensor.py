from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.support.files import archive
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, all_made

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
    made = all_made({"a": one, "b": [one, 5]})
    assert made["a"] is made["b"][0]
    assert torch.equal(made["a"], torch.ones(2, 3))
    assert made["b"][1] == 5
