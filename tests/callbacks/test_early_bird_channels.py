from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy, ChannelTicket, EarlyBirdChannels, GradualPruning
from tests.pruning.networks import images, made
from tests.quiet import QUIET

STEPS = 4
"""Of an epoch."""


class Classifier(L.LightningModule):
    def __init__(self, name: str = "vgg", optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.model, self.optimizer = made(name), optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), 0.01)


class Untraceable(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) if x.sum() > 0 else x


def data() -> DataLoader:
    samples = 2 * STEPS
    return DataLoader(TensorDataset(images(samples), torch.arange(samples) % 5), 2)


def fit(
    module: L.LightningModule,
    *callbacks: Callback,
    strategy: Any = None,
    resume: Path | None = None,
    **options: Any,
) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "precision": "64-true",
        **QUIET,
        **options,
    }
    run = L.Trainer(strategy=strategy or AxoSparseStrategy(), callbacks=[*callbacks], **settings)
    run.fit(module, data(), ckpt_path=resume)
    return run


def undecided(**options: Any) -> EarlyBirdChannels:
    """A search that draws nothing by itself."""
    return EarlyBirdChannels(**{"draw_by": None, "threshold": 1e-9, **options})


def test_the_penalty_is_its_subgradient() -> None:
    slimmed, plain = Classifier(), Classifier()
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with pytest.warns(UserWarning, match="No ticket of channels was drawn in 1 optimizer steps"):
        fit(slimmed, undecided(slimming=0.5), max_steps=1)
    fit(plain, max_steps=1)
    norms = {"model.1.weight", "model.5.weight", "model.10.weight"}
    for name, parameter in slimmed.named_parameters():
        other = plain.get_parameter(name)
        if name in norms:
            other = other - 0.01 * 0.5 * before[name].sign()
        assert torch.allclose(parameter, other, rtol=0, atol=1e-15), name


def test_only_what_can_be_removed_is_penalised() -> None:
    slimmed, plain = Classifier("resnet"), Classifier("resnet")
    with pytest.warns(UserWarning, match="No ticket"):
        fit(slimmed, undecided(slimming=0.5), max_steps=1)
    fit(plain, max_steps=1)
    changed = {
        name
        for name, parameter in slimmed.named_parameters()
        if not torch.equal(parameter, plain.get_parameter(name))
    }
    assert changed == {f"model.{n}.bn1.weight" for n in (1, 2, 3)}


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"every": 1, "window": 3, "threshold": 1.0}, 3),
        ({"every": 2, "window": 2, "draw_by": 3}, 3),
        ({"every": 3, "window": 2, "threshold": 1.0}, 6),
        ({"every": 3, "draw_by": 0.75}, 6),
        ({"window": 2, "threshold": 1.0}, 8),
        ({"draw_by": "1 epoch"}, 4),
    ],
)
def test_when_the_ticket_is_drawn(options: dict[str, Any], drawn: int) -> None:
    module, draw = Classifier(), undecided(**options)
    fit(module, draw)
    assert draw.ticket is not None
    assert draw.ticket.step == drawn
    assert draw.ticket.distances == draw.distances
    assert all(0 <= distance <= 1 for distance in draw.distances.values())
    assert draw.ticket.sparsity == 0.5
    kept = {name: kept for name, (_, kept) in draw.ticket.layer_channels().items()}
    assert kept == {n: module.get_submodule(n).num_features for n in kept}


def test_independent_scales_do_not_settle() -> None:
    class Shuffle(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            for norm in module.modules():
                if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
                    nn.init.normal_(norm.weight)

    draw = EarlyBirdChannels(every=1, draw_by=None, window=2)
    with pytest.warns(UserWarning, match=r"last mask_distance: 0\.\d+, threshold: 0\.1"):
        fit(Classifier(), Shuffle(), draw)
    assert draw.ticket is None
    assert min(draw.distances.values()) > draw.search.threshold


def test_a_ticket_is_used_from_the_start(tmp_path: Path) -> None:
    ticket = ChannelTicket.largest(Classifier(), 0.4)
    ticket.save(tmp_path / "ticket.pt")
    for given in (ticket, tmp_path / "ticket.pt"):
        module, draw = Classifier(), EarlyBirdChannels(ticket=given)
        fit(module, draw)
        assert draw.ticket == ticket
        assert module.model[0].out_channels == ticket.layer_channels()["model.1"][1] < 8
    with pytest.raises(MisconfigurationException, match="drawn from another model"):
        fit(Classifier("resnet"), EarlyBirdChannels(ticket=ticket))


REFUSED: dict[str, tuple[L.LightningModule, list[Callback]]] = {
    "(GradualPruning|EarlyBirdChannels) keeps dense": (Classifier(), [GradualPruning()]),
    "cannot be traced .*network='model'": (Untraceable(), []),
    "state 'row_var'": (Classifier(optimizer=torch.optim.Adafactor), []),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_shrink_is_refused_before_any_rank_starts(words: str) -> None:
    """An error of ranks would have a note."""
    module, callbacks = REFUSED[words]
    strategy = AxoSparseStrategy(g_inter=2)
    with pytest.raises(MisconfigurationException, match=words) as error:
        fit(module, EarlyBirdChannels(), *callbacks, strategy=strategy, devices=2)
    assert not hasattr(error.value, "__notes__")


def test_another_strategy_or_averaged_weights_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="WeightAveraging keeps dense weights"):
        fit(Classifier(), EarlyBirdChannels(), WeightAveraging())
    with pytest.raises(MisconfigurationException, match="SingleDeviceStrategy cannot remove"):
        fit(Classifier(), EarlyBirdChannels(), strategy="auto")


def test_a_part_that_can_be_traced_is_named() -> None:
    module, draw = Untraceable(), EarlyBirdChannels(network="model", draw_by=2)
    fit(module, draw)
    assert draw.ticket is not None
    assert module.model[0].out_channels < 8
