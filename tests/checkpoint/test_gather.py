"""What the first rank of a pipeline has in memory while it writes a checkpoint of all stages."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.checkpoint.consolidate import consolidate
from lightning_axosparse.checkpoint.gather import StageTensors, gather_shards
from lightning_axosparse.strategy.validation import validate_folder
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks


class Reading(Net):
    """Looks at the weights in the hook that is given the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = [value for value in checkpoint["state_dict"].values() if value.dim() == 2]
        checkpoint["sums"] = [float(weight.sum()) for weight in weights]
        checkpoint["state_dict"] = {k: v.half() for k, v in checkpoint["state_dict"].items()}


class ReadingByName(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        name, _ = next(self.named_parameters())
        checkpoint["first"] = float(checkpoint["state_dict"][name].double().sum())


class Counting:
    """Counts the tensors of other stages that are in memory at once."""

    def __init__(self) -> None:
        self.now = self.most = self.all = 0
        fetch = StageTensors._fetch

        def counted(tensors: StageTensors, offer: Any) -> Tensor:
            tensor = fetch(tensors, offer)
            self.now, self.all = self.now + 1, self.all + 1
            self.most = max(self.most, self.now)
            weakref.finalize(tensor, self.dropped)
            return tensor

        StageTensors._fetch = counted  # type: ignore[method-assign]

    def dropped(self) -> None:
        self.now -= 1


def write(folder: Path, module: type[Net], callback: Any = None, **options: Any) -> None:
    distributed = options.pop("save_distributed_checkpoint", False)
    run = trainer(
        AxoSparseStrategy(2, 2, save_distributed_checkpoint=distributed),
        2,
        callbacks=[callback or ModelCheckpoint(folder, "a")],
        enable_checkpointing=True,
        max_epochs=options.pop("max_epochs", 1),
        **options,
    )
    L.seed_everything(0, verbose=False)
    run.fit(module(), loader(1, batches=2))


def two_ranks(folder: Path) -> dict[str, Any]:
    counting = Counting()
    write(folder / "streamed", Net)
    facts = {"most": counting.most, "all": counting.all}
    write(folder / "theirs", Net, plugins=[TorchCheckpointIO()])
    write(folder / "read", Reading)
    write(folder / "read folder", Reading, save_distributed_checkpoint=True)
    before = counting.all
    for name, save_last in (("linked", "link"), ("copied", True)):
        best = ModelCheckpoint(folder / name, "{step}", save_last=save_last)
        write(folder, Net, best, max_epochs=3, save_distributed_checkpoint=True)
    facts["sharded"] = counting.all - before
    return facts


def reads_by_name(folder: Path, g_inter: int) -> None:
    callbacks = [ModelCheckpoint(folder, "named")]
    strategy = AxoSparseStrategy(g_inter)
    run = trainer(strategy, 2, callbacks=callbacks, enable_checkpointing=True, max_epochs=1)
    run.fit(ReadingByName(), loader(1, batches=2))


def test_a_hook_that_reads_a_weight_by_its_name_is_told_where(tmp_path: Path) -> None:
    run_ranks(2, reads_by_name, tmp_path, 1)  # Replicas have all weights.
    with pytest.raises(
        AssertionError, match=r"on_save_checkpoint reads .*`trainer.is_global_zero`"
    ):
        run_ranks(2, reads_by_name, tmp_path, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def facts(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, two_ranks, folder)


def test_one_tensor_of_another_stage_is_in_memory_at_a_time(facts: Any) -> None:
    first, second = facts
    assert first["most"] == 1
    assert first["all"] == 6  # two weights of the other rank with their two moments
    assert second == {"most": 0, "all": 0, "sharded": 0}


def test_no_tensor_travels_for_a_folder(facts: Any) -> None:
    assert facts[0]["sharded"] == 0


def test_every_plugin_and_hook_gets_the_values(facts: Any, folder: Path) -> None:
    streamed = torch.load(folder / "streamed" / "a.ckpt", weights_only=True)
    theirs = torch.load(folder / "theirs" / "a.ckpt", weights_only=True)
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(theirs[part], streamed[part], rtol=0, atol=0)
    weights = [value for value in streamed["state_dict"].values() if value.dim() == 2]
    file = consolidate(folder / "read folder" / "a.ckpt")
    for path in (folder / "read" / "a.ckpt", file):
        read = torch.load(path, weights_only=True)
        assert read["sums"] == [float(weight.sum()) for weight in weights]
        for key, value in read["state_dict"].items():
            assert torch.equal(value, streamed["state_dict"][key].half())


def test_old_folders_are_removed_and_the_last_is_linked(facts: Any, folder: Path) -> None:
    for name in ("linked", "copied"):
        assert {path.name for path in (folder / name).iterdir()} == {"step=6.ckpt", "last.ckpt"}
        assert all(path.is_dir() for path in (folder / name).iterdir())
        assert (folder / name / "last.ckpt").is_symlink() == (name == "linked")


def test_a_plugin_for_one_file_and_a_folder_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"TorchCheckpointIO writes one file"):
        write(tmp_path, Net, plugins=[TorchCheckpointIO()], save_distributed_checkpoint=True)


def test_a_folder_has_a_name_of_its_own_and_no_options(tmp_path: Path) -> None:
    (tmp_path / "b.ckpt").touch()
    validate_folder("memory://a/b.ckpt", None)
    validate_folder(tmp_path, None)
    with pytest.raises(MisconfigurationException, match=r"b\.ckpt' with storage_options"):
        validate_folder("/a/b.ckpt", {"option": 1})
    with pytest.raises(MisconfigurationException, match=r"b\.ckpt' is a file"):
        validate_folder(tmp_path / "b.ckpt", None)


class FourAlike(StageTensors):
    """Four replicas with the same part of the state."""

    def gather(self, mine: Any) -> list[Any]:
        return [mine] * 4


def test_steps_are_no_parts_of_a_parameter_with_as_many_elements_as_replicas() -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}
    bias, weight = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, 4))
    found = gather_shards(
        {"bias": state, "weight": state}, {"bias": bias, "weight": weight}, FourAlike(lambda: None)
    )
    for name, parameter in (("bias", bias), ("weight", weight)):
        made = {key: value.computed() for key, value in found[name].items()}
        assert float(made["step"]) == 3
        assert torch.equal(made["exp_avg"], torch.ones_like(parameter))
