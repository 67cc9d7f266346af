from __future__ import annotations

from pathlib import Path

import torch

from lightning_axosparse import CompactCheckpointIO
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.compact_io import compacted, expanded
from lightning_axosparse.checkpoint.sparse_encoding import EncodedTensor
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, all_made


def mostly_zeros() -> torch.Tensor:
    return torch.randn(64, 64) * (torch.rand(64, 64) < 0.1)


def test_only_floating_matrices_with_many_zeros_are_encoded() -> None:
    others = {
        "dense": torch.randn(64, 64),
        "vector": torch.zeros(64),
        "integers": torch.zeros(64, 64, dtype=torch.int64),
        "empty": torch.zeros(0, 64),
        "number": 3,
    }
    found = compacted({"pruned": mostly_zeros(), **others})
    assert EncodedTensor.is_record(found["pruned"])
    assert all(found[name] is value for name, value in others.items())


def test_a_tensor_with_two_names_is_encoded_once_and_is_one_tensor_again() -> None:
    weight = mostly_zeros()
    found = compacted({"state_dict": {"embedding": weight, "head": weight}})["state_dict"]
    assert found["embedding"] is found["head"]
    dense = all_made(expanded({"state_dict": found}))["state_dict"]
    assert dense["embedding"] is dense["head"]
    assert torch.equal(dense["head"], weight)


def test_a_file_is_smaller_and_loads_as_the_same_checkpoint(tmp_path: Path) -> None:
    checkpoint = {"epoch": 1, "optimizer_states": [{"state": {0: {"exp_avg": mostly_zeros()}}}]}
    for writer, name in ((CompactCheckpointIO(), "compact"), (AtomicCheckpointIO(), "dense")):
        writer.save_checkpoint(checkpoint, tmp_path / f"{name}.ckpt")
        loaded = CompactCheckpointIO().load_checkpoint(tmp_path / f"{name}.ckpt")
        torch.testing.assert_close(loaded, checkpoint, rtol=0, atol=0)
    sizes = [(tmp_path / f"{name}.ckpt").stat().st_size for name in ("compact", "dense")]
    assert sizes[0] < sizes[1] / 2


def test_encoded_tensors_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"pruned": mostly_zeros(), "dense": torch.randn(64, 64)}}
    checkpoint["state_dict"]["tied"] = checkpoint["state_dict"]["pruned"]
    CompactCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    deferred = CompactCheckpointIO().load_deferred(tmp_path / "a.ckpt")
    assert all(isinstance(each, DeferredTensor) for each in deferred["state_dict"].values())
    assert deferred["state_dict"]["tied"] is deferred["state_dict"]["pruned"]
    torch.testing.assert_close(all_made(deferred), checkpoint, rtol=0, atol=0)
