"""A trained model goes from its file into sparse storage, predicts, and trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_axosparse import (
    AxoSparseStrategy,
    EarlyBirdTicket,
    GradualPruning,
    Ticket,
    densify,
    load_sparse,
    save_safetensors,
    sparsify,
)
from lightning_axosparse.sparse.module.int8_linear import Int8Linear
from lightning_axosparse.sparse.module.parameters import layouts
from lightning_axosparse.sparse.store.scratch import scratch
from tests.memory import Storages
from tests.parity.cases import Net, Record, fit, loader, trainer
from tests.ranks import run_ranks
from tests.sparse.masking import apply_masks, sparse_and_dense

FORMS = ("checkpoint", "weights", "sparse safetensors", "dense safetensors")


def net() -> Net:
    return Net(outer=True, tied=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model trained to a ticket, in all forms of file."""
    folder = tmp_path_factory.mktemp("saved")
    files = {name: folder / f"{name}.ckpt" for name in FORMS[:2]}
    files.update({name: folder / f"{name}.safetensors" for name in FORMS[2:]})
    draw = EarlyBirdTicket(0.6, every="1 epoch", draw_by="1 epoch")
    L.seed_everything(0, verbose=False)
    run = trainer(
        AxoSparseStrategy(),
        callbacks=[draw, ModelCheckpoint(folder, filename="checkpoint")],
        enable_checkpointing=True,
    )
    model = net()
    run.fit(model, loader(1))
    assert draw.ticket is not None
    torch.save(model.state_dict(), files["weights"])
    load_sparse(model, files["checkpoint"])
    save_safetensors(model, files["sparse safetensors"])
    save_safetensors(model, files["dense safetensors"], sparse=False)
    densify(model)
    return {"files": files, "model": model, "ticket": draw.ticket}


def own_ticket(saved: dict[str, Any], form: str) -> Ticket | None:
    return saved["ticket"] if form in ("weights", "dense safetensors") else None


def predict(model: L.LightningModule) -> torch.Tensor:
    predictions = trainer("auto").predict(model, loader(5))
    assert predictions is not None
    return torch.cat(predictions)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_form_of_file_loads_and_predicts(
    saved: dict[str, Any], form: str, device: str
) -> None:
    model = net()
    with torch.device(device):
        model.model = net().model
    ticket = load_sparse(model, saved["files"][form], own_ticket(saved, form))
    assert dict(ticket.masks).keys() == set(saved["ticket"].masks)
    assert ticket.sparsity == pytest.approx(0.6, abs=1e-3)
    assert set(layouts(model)) == set(saved["ticket"].masks)
    assert model.model[4]._parameters["weight"] is model.model[2]._parameters["weight"]
    expected = saved["model"].state_dict()
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    assert torch.equal(predict(model), predict(saved["model"]))


class ByName(Net):
    """The same optimizer groups, selected by name: a plain Trainer shows vectors for matrices."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        weights = [p for name, p in named.items() if name.endswith("weight")]
        others = [p for name, p in named.items() if not name.endswith("weight")]
        (optimizer,), schedules = super().configure_optimizers()
        optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = weights, others
        return [optimizer], schedules


def _loopback() -> AxoSparseStrategy:
    return AxoSparseStrategy(g_inter=3, transport="loopback", microbatches=1)


RUNS = {
    "any trainer": (ByName, lambda: "auto", False),
    "strategy": (Net, AxoSparseStrategy, False),
    "ticket": (Net, AxoSparseStrategy, True),
    "pipeline": (Net, _loopback, True),
}


@pytest.fixture(scope="module")
def masked(saved: dict[str, Any]) -> Record:
    """Masked dense training from the same weights."""
    model = net().double()
    model.load_state_dict(saved["model"].state_dict())
    masking = Masked(dict(saved["ticket"].masks))
    run = trainer("auto", callbacks=[masking], precision="64-true", max_epochs=1)
    return fit(run, model)


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_on_as_masked_dense_training_does(
    saved: dict[str, Any], masked: Record, name: str
) -> None:
    kind, strategy, adopt = RUNS[name]
    model = kind(outer=True, tied=True).double()
    ticket = load_sparse(model, saved["files"]["checkpoint"])
    callbacks = [GradualPruning(ticket=ticket)] if adopt else []
    run = trainer(strategy(), callbacks=callbacks, precision="64-true", max_epochs=1)
    record = fit(run, model)
    assert record.losses == pytest.approx(masked.losses, abs=1e-12)
    torch.testing.assert_close(record.weights, masked.weights)


class Masked(L.Callback):
    """Masked dense training."""

    def __init__(self, masks: dict[str, torch.Tensor]) -> None:
        self.masks = masks

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name, parameter in module.named_parameters():
            if name in self.masks:
                parameter.grad.mul_(self.masks[name])

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        apply_masks(module, self.masks)


def fine_tune_on_ranks(path: Path) -> Any:
    model = net().double()
    ticket = load_sparse(model, path)
    strategy = AxoSparseStrategy(g_inter=2, microbatches=1)
    draw = GradualPruning(ticket=ticket)
    run = trainer(strategy, 2, callbacks=[draw], precision="64-true", max_epochs=1)
    return fit(run, model)


def test_ranks_train_on_what_was_loaded(saved: dict[str, Any], masked: Record) -> None:
    for record in run_ranks(2, fine_tune_on_ranks, saved["files"]["sparse safetensors"]):
        assert record.losses == pytest.approx(masked.losses, abs=1e-12)
        torch.testing.assert_close(record.weights, masked.weights)


class Larger(Net):
    """A backbone from elsewhere with a head of its own."""

    def __init__(self) -> None:
        super().__init__(outer=True, tied=True)
        self.model[5] = nn.Linear(24, 7)
        self.accuracy = MulticlassAccuracy(7)
        self.extra = nn.Linear(2, 2)


@pytest.mark.parametrize("form", ["checkpoint", "sparse safetensors"])
def test_a_fresh_head_stays_dense_and_learns(saved: dict[str, Any], form: str) -> None:
    model = Larger()
    head = model.model[5].weight.detach().clone()
    ticket = load_sparse(model, saved["files"][form], skip=["model.5.*", "extra.*"])
    assert set(layouts(model)) == set(saved["ticket"].masks) - {"model.5.weight"}
    assert ticket.shapes.keys() == set(layouts(model))
    assert torch.equal(model.model[5].weight, head)
    values = {n: p.shape for n, p in model.named_parameters()}
    draw = GradualPruning(ticket=ticket)
    trainer(AxoSparseStrategy(), callbacks=[draw]).fit(model, loader(1))
    assert not torch.equal(model.model[5].weight, head)
    for name, mask in ticket.masks.items():
        weight = dict(model.named_parameters())[name]
        assert values[name] == (int(mask.sum()),)
        assert not weight[~mask].any()
        assert weight[mask].all()


def leaves(value: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Wide(L.LightningModule):
    """Layers that are wide enough for products with unpruned values."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 5)
        self.model = nn.Sequential(*layers)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        outputs: torch.Tensor = self.model(batch)
        return outputs


def wide_file(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Wide()
    sparsify(model, Ticket.magnitude(model, 0.7).masks)
    save_safetensors(model, folder / "wide.safetensors")
    return folder / "wide.safetensors"


def predict_in_int8(file: Path, strategy: Any = "auto", devices: int = 1) -> torch.Tensor:
    model = Wide()
    load_sparse(model, file, dtype=torch.int8)
    batches = DataLoader(torch.linspace(-1, 1, 26 * 64).sin().view(26, 64), batch_size=12)  # type: ignore[arg-type]
    predictions = trainer(strategy, devices).predict(model, batches)
    return torch.cat(predictions)  # type: ignore[arg-type]


def predict_on_ranks(file: Path) -> torch.Tensor:
    return predict_in_int8(file, AxoSparseStrategy(g_inter=2), 2)


def test_ranks_predict_in_int8_what_one_process_does(tmp_path: Path) -> None:
    file = wide_file(tmp_path)
    alone = predict_in_int8(file)
    for predictions in run_ranks(2, predict_on_ranks, file):
        assert torch.equal(predictions, alone)


def test_a_fresh_head_learns_on_layers_of_int8(tmp_path: Path) -> None:
    model, head = Wide(), "model.4.*"
    load_sparse(model, wide_file(tmp_path), skip=[head], dtype=torch.int8)
    assert isinstance(model.model[2], Int8Linear)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"model.4.weight", "model.4.bias"}
    model.model(torch.randn(3, 64)).sum().backward()
    assert model.model[4].weight.grad.any()


def test_tied_weights_are_in_a_checkpoint_once(saved: dict[str, Any]) -> None:
    names = [f"model.{layer}.weight" for layer in (2, 4)]
    state = torch.load(saved["files"]["checkpoint"], weights_only=False)["state_dict"]
    one, other = (state[name].untyped_storage().data_ptr() for name in names)
    assert one == other
    assert list(state) == list(saved["model"].state_dict())


@pytest.mark.parametrize("form", ["weights", "sparse safetensors"])
def test_the_dense_weights_are_never_there_together(tmp_path: Path, form: str) -> None:
    layers, width = 48, 128
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    masks = {f"{i}.weight": torch.rand(width, width) < 0.05 for i in range(layers)}
    sparse, dense = sparse_and_dense(model, masks)
    path = tmp_path / ("model.safetensors" if "safetensors" in form else "model.ckpt")
    if form == "weights":
        torch.save(dense.state_dict(), path)
    else:
        save_safetensors(sparse, path)
    with torch.device("meta"):
        loaded = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    source: Any = torch.load(path, mmap=True) if form == "weights" else path
    ticket = Ticket(masks, 0.95)
    scratch.clear()  # what other tests needed
    with Storages(leaves(source)) as storages:
        load_sparse(loaded, source, ticket)
    assert storages.peak < 0.5 * layers * width * width * 4
    torch.testing.assert_close(loaded.state_dict(), dense.state_dict(), rtol=0, atol=0)


def assert_raises(model: nn.Module, message: str, *args: Any, **settings: Any) -> None:
    before = {name: (p.shape, p.device) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        load_sparse(model, *args, **settings)
    assert {name: (p.shape, p.device) for name, p in model.named_parameters()} == before


def test_wrong_names_and_shapes_raise_and_change_nothing(saved: dict[str, Any]) -> None:
    files = saved["files"]
    assert_raises(Larger(), r"lacks 'extra.weight'.*skip", files["checkpoint"])
    assert_raises(Net(outer=True), r"ticket=", files["weights"])
    assert_raises(Net(tied=True), r"no 'scale', 'temperature'", files["checkpoint"])
    assert_raises(
        Larger(),
        r"'model.5.weight'.*\(5, 24\) in the file, \(7, 24\) in the",
        files["checkpoint"],
        skip=["extra.*"],
    )
    other = Ticket({"model.5.weight": torch.ones(7, 24, dtype=torch.bool)}, 0.5)
    assert_raises(net(), r"has shape \(7, 24\), the parameter \(5, 24\)", files["weights"], other)
    with torch.device("meta"):
        fresh = Larger()
    skip = ["model.5.*", "extra.*"]
    assert_raises(fresh, r"meta device.*'model.5.weight'", files["checkpoint"], skip=skip)
    with torch.device("meta"):
        measured = nn.ModuleDict({"net": net(), "accuracy": MulticlassAccuracy(5)})
    state = {f"net.{name}": value for name, value in net().state_dict().items()}
    assert_raises(measured, r"meta device.*'accuracy'", state)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_sparse(net(), "nowhere.ckpt")
    with pytest.raises(ValueError, match=r"\['head.\*'\]"):
        load_sparse(net(), files["checkpoint"], skip="head.*")
    with pytest.raises(ValueError, match=r"dtype=torch.int4 must be torch.int8 or None"):
        load_sparse(net(), files["checkpoint"], dtype=torch.int4)


@pytest.mark.parametrize("name", ["half.ckpt", "half.safetensors"])
def test_a_file_that_is_not_whole_is_named(
    saved: dict[str, Any], tmp_path: Path, name: str
) -> None:
    form = "checkpoint" if name.endswith("ckpt") else "sparse safetensors"
    file = saved["files"][form]
    (tmp_path / name).write_bytes(Path(file).read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{name}' cannot be read"):
        load_sparse(net(), tmp_path / name)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list.pt' holds a list"):
        load_sparse(net(), tmp_path / "list.pt")
