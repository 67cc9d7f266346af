"""What a call on ranks has changed, and its weights, come back to the caller."""

from __future__ import annotations

import pickle
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse.strategy.launcher.changes import Snapshot, read_tensors, write_tensors


def net() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    module[2].weight = nn.Parameter(module[0].weight.detach().clone().T)
    module.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    return module


def named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def test_values_go_into_the_memory_of_the_parameters_and_buffers(tmp_path: Path) -> None:
    sent, received = net(), net()
    with torch.no_grad():
        sent[1](sent[0](torch.randn(5, 3)))
    before = {name: tensor.data_ptr() for name, tensor in named(received).items()}
    write_tensors(named(sent).items(), tmp_path / "0")
    read_tensors(tmp_path / "0", received)
    for name, tensor in named(sent).items():
        assert torch.equal(named(received)[name], tensor)
        assert named(received)[name].data_ptr() == before[name]


def test_files_of_several_ranks_make_up_the_module(tmp_path: Path) -> None:
    sent, received = net(), net()
    parts = [("0.",), ("1.", "2.", "scalar")]
    for rank, part in enumerate(parts):
        own = [item for item in named(sent).items() if item[0].startswith(part)]
        write_tensors(own, tmp_path / str(rank))
        read_tensors(tmp_path / str(rank), received)
    for name, tensor in named(sent).items():
        assert torch.equal(named(received)[name], tensor)


def test_a_parameter_without_memory_or_of_another_form_gets_memory(tmp_path: Path) -> None:
    sent, received = net().bfloat16(), net()
    received[0].weight = nn.Parameter(torch.empty(4, 3, device="meta", dtype=torch.bfloat16))
    parameters = list(received.parameters())
    write_tensors(named(sent).items(), tmp_path / "0")
    read_tensors(tmp_path / "0", received)
    for name, tensor in named(sent).items():
        assert torch.equal(named(received)[name], tensor)
        assert named(received)[name].dtype == tensor.dtype
    assert all(a is b for a, b in zip(parameters, received.parameters(), strict=True))


def test_a_tensor_is_written_before_the_next_one_is_made(tmp_path: Path) -> None:
    sizes = []

    def tensors() -> list:
        for _ in range(3):
            sizes.append((tmp_path / "0").stat().st_size)
            yield "0.weight", torch.ones(300_000)

    write_tensors(tensors(), tmp_path / "0")
    assert sizes[0] == 0
    assert sizes[2] > 1_200_000


def test_a_name_that_the_caller_does_not_have_is_passed_over(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    write_tensors({"gone": torch.ones(3), "bias": torch.tensor([5.0, 6.0])}.items(), tmp_path / "0")
    read_tensors(tmp_path / "0", module)
    assert module.bias.tolist() == pytest.approx([5, 6])


def test_an_attribute_that_became_a_submodule_is_removed() -> None:
    """As in `configure_model`, where ``self.net = None`` of ``__init__`` becomes a module."""
    caller, rank = (nn.Module() for _ in range(2))
    caller.net = rank.net = None
    before = Snapshot({"model": rank})
    rank.net = nn.Linear(2, 2)
    changes = pickle.loads(pickle.dumps(before.changes()))
    changes.apply({"model": caller})
    assert isinstance(caller.net, nn.Linear)
    assert "net" not in vars(caller)


class Recording(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.all, self.epoch = list[list[int]](), list[int]()


def test_a_collection_is_updated_in_place_if_the_call_has_not_replaced_it() -> None:
    caller, rank = Recording(), Recording()
    trainers = [L.Trainer(logger=False, enable_checkpointing=False) for _ in range(2)]
    for each in (caller, rank):
        each.all.append(each.epoch)
    first, all_epochs, metrics = caller.epoch, caller.all, trainers[0].callback_metrics
    before = Snapshot({"model": rank, "trainer": trainers[1]})
    rank.epoch = [1]
    rank.all.append(rank.epoch)
    trainers[1].callback_metrics["loss"] = torch.tensor(0.5)
    changes = pickle.loads(pickle.dumps(before.changes()))
    changes.apply({"model": caller, "trainer": trainers[0]})
    assert caller.all is all_epochs
    assert caller.all == [[], [1]]
    assert caller.epoch is caller.all[1]
    assert first == []
    assert trainers[0].callback_metrics == {"loss": torch.tensor(0.5)}
    assert metrics == {}
