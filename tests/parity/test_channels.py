"""Training that removes channels is masked dense training, on every grid as on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy, ChannelTicket, EarlyBirdChannels
from lightning_axosparse.pipeline.crossing import message
from tests.parity.cases import Record, difference, recorded, trainer
from tests.pruning.networks import images, made
from tests.ranks import run_ranks

RATIO, SLIMMING, DRAWN, EPOCHS, BATCHES = 0.5, 1e-2, 4, 4, 3
"""The ticket is drawn inside the second of four epochs of three batches."""


class Classifier(L.LightningModule):
    """A network of the tests of channels, with a scheduler and two groups of parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = made(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 1e-2}, {"params": others}]
        optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


def data(seed: int) -> DataLoader:
    samples = 8 * BATCHES
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (samples,), generator=generator)
    return DataLoader(TensorDataset(images(samples, seed), labels), 8)


class Masked(Callback):
    """Network slimming by hand, with masks instead of another network."""

    def __init__(self, scales: list[str]) -> None:
        self.scales, self.dropped = scales, {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name in self.scales:
            norm = module.get_submodule(name)
            if name in self.dropped:
                norm.weight.grad[self.dropped[name]] = norm.bias.grad[self.dropped[name]] = 0.0
            else:
                norm.weight.grad += SLIMMING * norm.weight.sign().detach()

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        norms = {name: module.get_submodule(name) for name in self.scales}
        if trainer.global_step == DRAWN:
            every = torch.cat([norm.weight.abs() for norm in norms.values()]).sort().values
            lowest = every[round(RATIO * len(every)) - 1]
            self.dropped = {n: norm.weight.abs() <= lowest for n, norm in norms.items()}
        for name, dropped in self.dropped.items():
            norms[name].weight[dropped] = norms[name].bias[dropped] = 0.0


def options(epochs: int = EPOCHS) -> dict[str, Any]:
    return {"precision": "64-true", "max_epochs": epochs, "gradient_clip_val": 1.0}


def masked(name: str, ticket: ChannelTicket) -> tuple[Record, dict[str, Tensor]]:
    """Plain Lightning on one process, its weights without the dropped channels."""
    reference = Masked(list(ticket.masks))
    run, module = trainer(callbacks=[reference], **options()), Classifier(name)
    run.fit(module, data(1), data(2))
    ticket.apply(module)
    return recorded(run, module), {n: ~dropped for n, dropped in reference.dropped.items()}


def train(
    name: str,
    ranks: int,
    strategy: dict[str, Any],
    folder: Path | None = None,
    resume: Path | None = None,
    statistics: bool = True,
) -> tuple[Record, ChannelTicket]:
    draw = EarlyBirdChannels(RATIO, SLIMMING, 0.0, every=2, draw_by=DRAWN)
    kept = [] if folder is None else [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    run = trainer(
        AxoSparseStrategy(**{"microbatches": 1, **strategy}),
        ranks,
        callbacks=[draw, *kept],
        enable_checkpointing=folder is not None,
        **options(),
    )
    module = Classifier(name)
    if not statistics:
        for norm in module.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):  # Those of a batch differ on replicas.
                norm.eval().train = lambda mode=True, norm=norm: norm
    run.fit(module, data(1), data(2), ckpt_path=resume)
    assert draw.ticket is not None
    return recorded(run, module), draw.ticket


CUT = {"g_inter": 2, "balance": [5, 8]}
"""Two stages of the VGG; the BatchNorm that decides about the last layer's channels is behind."""

Results = dict[str, tuple[Record, ChannelTicket]]


def on_two_ranks(folder: Path) -> tuple[Results, list[int]]:
    """All runs of one job, and the bytes of each message that this rank sent in the first."""

    sent, encode = [], message.encode

    def counted(tree: Any, device: torch.device) -> tuple[bytes, Tensor, Sequence[Tensor]]:
        encoded = encode(tree, device)
        sent.append(encoded[1].numel())
        return encoded

    message.encode = counted
    results = {"whole": train("vgg", 2, CUT, folder)}
    message.encode = encode
    for epoch in (0, 1):
        results[f"resumed {epoch}"] = train("vgg", 2, CUT, resume=folder / f"epoch={epoch}.ckpt")
    results["micro-batches"] = train("vgg", 2, {**CUT, "microbatches": 2})
    results["replicas"] = train("resnet", 2, {})
    results["divided"] = train("resnet", 2, {"shard_optimizer": True})
    regrid = {"g_inter": 2, "regrid": 1, "microbatches": 2}
    results["regrid"] = train("resnet", 2, regrid, statistics=False)
    return results, sent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("channels")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[tuple[Results, list[int]]]:
    return run_ranks(2, on_two_ranks, folder)


def test_a_pipeline_trains_as_one_process_with_masks(ranks: Any) -> None:
    for results, _ in ranks:
        record, ticket = results["whole"]
        expected, masks = masked("vgg", ticket)
        assert len(expected.losses) == EPOCHS * BATCHES
        assert {n: m.tolist() for n, m in ticket.masks.items()} == {
            n: m.tolist() for n, m in masks.items()
        }
        assert ticket.step == DRAWN
        assert 0 < ticket.sparsity <= RATIO
        assert difference(without_distances(record), expected) <= 1e-12


def without_distances(record: Record) -> Record:
    """What plain Lightning records, too."""

    def others(logged: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{k: v for k, v in each.items() if k != "mask_distance"} for each in logged]

    return replace(record, logged=others(record.logged), validated=others(record.validated))


def test_the_messages_shrink(ranks: Any) -> None:
    (results, sent), _ = ranks
    _, ticket = results["whole"]
    before, after = ticket.layer_channels()["model.5"]
    assert after < before
    assert [*dict.fromkeys(sent)] == [8 * channels * 4 * 4 * 8 for channels in (before, after)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_checkpoint_resumes_before_and_after_the_draw(
    ranks: Any, folder: Path, epoch: int
) -> None:
    expected, ticket = ranks[0][0]["whole"]
    alone = train("vgg", 1, {}, resume=folder / f"epoch={epoch}.ckpt")
    for record, found in [*(results[f"resumed {epoch}"] for results, _ in ranks), alone]:
        assert found == ticket
        assert len(record.losses) == (EPOCHS - 1 - epoch) * BATCHES
        assert record.losses == pytest.approx(expected.losses[-len(record.losses) :], abs=1e-12)
        torch.testing.assert_close(record.weights, expected.weights, rtol=0, atol=1e-12)


def test_a_checkpoint_loads_into_a_module_that_its_ticket_has_shrunk(
    ranks: Any, folder: Path
) -> None:
    record, ticket = ranks[0][0]["whole"]
    file = folder / f"epoch={EPOCHS - 1}.ckpt"
    assert ChannelTicket.load(file) == ticket
    module = Classifier("vgg")
    ChannelTicket.load(file).apply(module)
    module.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, record.weights[name]), name
    assert module.model[4].in_channels == ticket.layer_channels()["model.1"][1]
    run = trainer(AxoSparseStrategy())
    fresh = Classifier("vgg")
    run.validate(fresh, data(2), ckpt_path=file, verbose=False)
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(
        record.validated[-1]["val_loss"], abs=1e-12
    )


def test_a_checkpoint_from_before_the_draw_needs_a_module_with_all_channels(
    ranks: Any, folder: Path
) -> None:
    assert ChannelTicket.in_checkpoint(torch.load(folder / "epoch=0.ckpt")) is None
    module, callback = Classifier("vgg"), EarlyBirdChannels(ticket=ranks[0][0]["whole"][1])
    callback.ticket.apply(module)
    run = trainer(AxoSparseStrategy(), callbacks=[callback])
    with pytest.raises(MisconfigurationException, match=r"channels have been removed.*new module"):
        run.validate(module, data(2), ckpt_path=folder / "epoch=0.ckpt", verbose=False)


def test_micro_batches_and_a_regrid_change_nothing(ranks: Any) -> None:
    for name, expected in (
        ("micro-batches", train("vgg", 1, {**CUT, "microbatches": 2, "transport": "loopback"})[0]),
        ("regrid", train("resnet", 1, {"microbatches": 2}, statistics=False)[0]),
    ):
        for results, _ in ranks:
            record, ticket = results[name]
            assert ticket.sparsity > 0
            if name == "regrid":  # Then losses are those of the rank's own part of the batch.
                record = replace(expected, weights=record.weights)
            assert difference(record, expected) <= 1e-12, name


def test_replicas_stay_equal(ranks: Any) -> None:
    (one, ticket), (two, other) = (results["replicas"] for results, _ in ranks)
    assert ticket == other
    for name, weight in one.weights.items():
        if "running" not in name:  # Each has seen other samples.
            assert torch.equal(weight, two.weights[name]), name
    for results, _ in ranks:
        record, found = results["divided"]
        assert found == ticket
        assert difference(record, results["replicas"][0]) == 0
