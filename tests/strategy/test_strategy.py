from __future__ import annotations

import subprocess
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, GradualPruning
from tests.parity.cases import BATCHES, CLASSES, FEATURES, Net, difference, fit, loader, trainer
from tests.ranks import PATIENCE, run_ranks, warm_python


class TwoBranches(Net):
    """Has a second container; whether it is called depends on the values of a batch, or not."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.other, self.asks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2)), asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and x.isnan().any():
            x = self.other[1](self.other[0](x))
        return super().forward(x)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Flat(Net):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(FEATURES, CLASSES)


def test_a_grid_that_does_not_fit_is_refused_by_the_trainer() -> None:
    with pytest.raises(MisconfigurationException, match=r"g_inter=3 .* 4 rank.*\[1, 2, 4\]"):
        trainer(AxoSparseStrategy(g_inter=3), 4)


class LineSearch(Net):
    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.LBFGS(self.parameters())}


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model[i].parameters(), 0.1) for i in (0, 2)]


@pytest.mark.parametrize(
    ("module", "strategy", "callbacks", "words"),
    [
        (Net, {"g_inter": 8}, [], "g_inter=8 stages.* has 6"),
        (TwoBranches, {"g_inter": 2, "pipeline": "accuracy"}, [], "'accuracy' must name"),
        (Flat, {"g_inter": 2}, [], "nothing to partition"),
        (Manual, {"g_inter": 2}, [], "automatic_optimization"),
        (LineSearch, {"g_inter": 2}, [], "LBFGS"),
        (TwoOptimizers, {"g_inter": 2}, [], "2 optimizers"),
        (Net, {"g_inter": 2, "balance": [2, 2]}, [], r"balance=\[2, 2\]"),
        (Net, {"g_inter": 2}, [ModelPruning("l1_unstructured")], "GradualPruning"),
    ],
)
def test_modules_that_do_not_fit_are_refused_before_any_rank_starts(
    module: type[Net], strategy: dict[str, Any], callbacks: list[Any], words: str
) -> None:
    run = trainer(AxoSparseStrategy(**strategy), strategy["g_inter"], callbacks=callbacks)
    with pytest.raises(MisconfigurationException, match=words):
        run.fit(module(), loader(1))


class WithoutContainer(Net):
    """Its layers are attributes, and not in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.head, self.stem = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


@pytest.mark.slow
def test_ranks_name_the_modules_that_a_batch_calls() -> None:
    run = trainer(AxoSparseStrategy(g_inter=2), 2, callbacks=[])
    with pytest.raises(MisconfigurationException, match=r"pipeline=\['stem', 'head'\]"):
        run.fit(WithoutContainer(), loader(1))


def test_the_batches_show_which_container_is_called() -> None:
    for asks in (False, True):
        records = []
        for each in ("auto", AxoSparseStrategy(g_inter=2, transport="loopback")):
            L.seed_everything(0, verbose=False)
            run = trainer(each, max_epochs=1, precision="64-true")
            records.append(fit(run, TwoBranches(asks)))
        assert difference(*records) < 1e-12


def test_the_string_names_the_strategy() -> None:
    run = trainer("axosparse")
    assert isinstance(run.strategy, AxoSparseStrategy)
    fit(run, Net())


def test_norms_over_ranks_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="sync_batchnorm=True"):
        trainer(AxoSparseStrategy(), 2, sync_batchnorm=True).fit(Net(), loader(1))


def test_before_the_first_run_there_is_nothing_to_gather() -> None:
    with AxoSparseStrategy(g_inter=2).summon_full_params():
        pass


def test_one_rank_starts_no_mpi(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "from tests.parity.cases import Net, fit, trainer\n"
        "from lightning_axosparse import AxoSparseStrategy\n"
        "fit(trainer(AxoSparseStrategy(g_inter=2, transport='loopback')), Net())\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
    )
    subprocess.run([*warm_python(), "train.py"], check=True, cwd=tmp_path, timeout=PATIENCE)


def floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def test_fit_validate_test_and_predict_return_as_usual(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    plain, module = trainer("auto"), Net()
    expected = deepcopy(fit(plain, module))
    metrics, epoch = floats(plain.callback_metrics), plain.current_epoch
    results = [
        plain.validate(module, loader(2, 3), verbose=False),
        plain.test(module, loader(3, 2), verbose=False),
        plain.predict(module, loader(4, 2)),
    ]
    L.seed_everything(0, verbose=False)
    run, copy = trainer(AxoSparseStrategy(g_inter=2, microbatches=4), 2), Net()
    before = dict(copy.named_parameters())
    assert difference(expected, fit(run, copy)) <= 5e-7
    assert all(parameter is before[name] for name, parameter in copy.named_parameters())
    assert floats(run.callback_metrics) == pytest.approx(metrics, abs=1e-6)
    assert run.current_epoch == epoch
    ours = [
        run.validate(copy, loader(2, 3), verbose=False),
        run.test(copy, loader(3, 2), verbose=False),
    ]
    for mine, theirs in zip(ours, results, strict=False):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-6)
    predictions = run.predict(copy, loader(4, 2))
    assert predictions is not None
    for mine, theirs in zip(predictions, results[2], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    with pytest.warns(UserWarning, match="gets no states of optimizers and schedulers"):
        run.save_checkpoint(tmp_path / "all.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)


def test_a_ticket_comes_back_with_the_callback_and_the_module_dense() -> None:
    L.seed_everything(0, verbose=False)
    ticket = EarlyBirdTicket(0.75, every="1 epoch", draw_by="2 epochs")
    run, module = trainer(AxoSparseStrategy(g_inter=2, regrid=1), 2, callbacks=[ticket]), Net()
    fit(run, module)
    assert isinstance(run.strategy, AxoSparseStrategy)
    assert run.strategy.regridded is not None
    assert run.strategy.regridded.epoch == 2
    assert ticket.ticket is not None
    assert ticket.ticket.step == 2 * BATCHES
    for name, mask in ticket.ticket.masks.items():
        weight: Tensor = module.get_parameter(name)
        assert weight.shape == mask.shape
        assert torch.equal(weight != 0, mask)
    L.seed_everything(0, verbose=False)
    alone = EarlyBirdTicket(0.75, every="1 epoch", draw_by="2 epochs")
    other = Net()
    fit(trainer(AxoSparseStrategy(), callbacks=[alone]), other)
    assert alone.ticket == ticket.ticket
    for name, weight in other.state_dict().items():
        assert torch.allclose(weight, module.state_dict()[name], atol=1e-6)
    adopted = GradualPruning(ticket=ticket.ticket)
    third = Net()
    fit(trainer(AxoSparseStrategy(), callbacks=[adopted]), third)
    masks = ticket.ticket.masks
    assert all(torch.equal(third.get_parameter(n) != 0, m) for n, m in masks.items())


class MadeLater(Net):
    """Has no layers before the Trainer asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Net().model
            self.model[5].register_buffer("steps", torch.zeros(()))

    def on_train_batch_end(self, *args: Any) -> None:
        self.model[5].steps += 1

    def on_fit_end(self) -> None:
        self.held = {name for name, value in self.named_parameters() if not value.is_meta}
        self.refusal = ""
        try:
            self.state_dict()
        except RuntimeError as refusal:
            self.refusal = str(refusal)


def test_layers_made_in_configure_model_are_dealt_pruned_and_brought_home() -> None:
    trained = []
    for strategy, devices in ((AxoSparseStrategy(), 1), (AxoSparseStrategy(g_inter=2), 2)):
        L.seed_everything(0, verbose=False)
        ticket = EarlyBirdTicket(
            0.75,
            every="1 epoch",
            draw_by="2 epochs",
            which={"model.5.*": False},
        )
        module = MadeLater()
        run = trainer(strategy, devices, callbacks=[ticket], precision="64-true")
        trained.append(fit(run, module))
        assert not module.get_parameter("model.2.weight").all()
        assert module.get_parameter("model.5.weight").all()
        assert module.model[5].steps == run.global_step
    assert "the module is whole when `fit` has returned" in module.refusal
    assert {"model.5.weight"} < module.held < set(dict(module.named_parameters()))
    assert difference(*trained) <= 1e-12


def test_what_configure_model_makes_is_refused_once_it_is_there() -> None:
    wrong = GradualPruning(which={"no.such": False})
    with pytest.raises(MisconfigurationException, match=r"'no\.such' matches no parameter"):
        fit(trainer(AxoSparseStrategy(), callbacks=[wrong]), MadeLater())
    loopback = AxoSparseStrategy(g_inter=8, transport="loopback")
    with pytest.raises(MisconfigurationException, match=r"g_inter=8 stages.* has 6"):
        fit(trainer(loopback), MadeLater())


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(loader(1).dataset)


def test_a_share_of_a_stream_is_refused_before_any_rank_starts() -> None:
    run = trainer(AxoSparseStrategy(g_inter=2), 2, callbacks=[GradualPruning()])
    with pytest.raises(MisconfigurationException, match="no share of it") as error:
        run.fit(Net(), DataLoader(Stream(), batch_size=8))
    assert not hasattr(error.value, "__notes__")  # which tell the rank


class Failing(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        raise ArithmeticError("seven is not prime enough")


def test_a_rank_that_raises_ends_the_job_and_is_named() -> None:
    run = trainer(AxoSparseStrategy(g_inter=2), 2)
    named = r"^seven is not prime enough\nOn rank 0 \(stage 1 of replica 0\):"
    with pytest.raises(ArithmeticError, match=named):
        run.fit(Failing(), loader(1), loader(2))


def connect_where_one_fits() -> str:
    from lightning_axosparse.distributed.mpi.environment import placement

    run = trainer(AxoSparseStrategy(g_inter=2), 1, num_nodes=2)
    if placement().local_rank == 0:
        return ""
    run.strategy.connect(Net())
    with pytest.raises(MisconfigurationException) as refusal:
        run.strategy.setup_environment()
    return str(refusal.value)


def test_a_node_with_more_ranks_than_devices_is_refused() -> None:
    assert "rank 1 of its node, counted from 0" in run_ranks(2, connect_where_one_fits)[1]
