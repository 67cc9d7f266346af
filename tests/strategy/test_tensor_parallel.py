"""What tensor parallelism cannot do is refused in words, before any rank is started."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from lightning_axosparse import AxoSparseStrategy, EarlyBirdChannels, PipelineTimeline
from lightning_axosparse.strategy import validation
from lightning_axosparse.strategy.tensor_parallel import hugging_face_plan
from lightning_axosparse.strategy.validation import advise_on_dropout
from tests.faults import jobs
from tests.ranks import run_ranks

PLAN = {"model.0": ColwiseParallel(), "model.1": RowwiseParallel()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "loopback"}, "transport='loopback' does not work with g_tensor=2"),
        ({"balance": "time"}, "balance='time' does not work"),
        ({"g_inter": 2, "regrid": 1}, "regrid=1 does not work"),
        ({"g_tensor": 0}, "g_tensor=0 must be"),
        ({"tensor_plan": "mine"}, "tensor_plan='mine' must be"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AxoSparseStrategy(**{"g_tensor": 2, "tensor_plan": PLAN, **options})


class Rows(jobs.Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def fit(module: L.LightningModule, ranks: int = 2, **options: Any) -> None:
    callbacks = options.pop("callbacks", [])
    strategy = {"g_inter": 1, "g_tensor": 2, "tensor_plan": PLAN, **options}
    jobs.train(module, ranks=ranks, callbacks=callbacks, **strategy)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (jobs.Plain, {"tensor_plan": None}, "there is no plan.*configure_model"),
        (jobs.Plain, {"tensor_plan": "auto"}, "tensor_plan='auto' .* none has one"),
        (jobs.Plain, {"ranks": 3}, r"g_tensor=2 .* 3 rank.*\[1, 3\]"),
        (jobs.Plain, {"callbacks": [EarlyBirdChannels(0.5)]}, "EarlyBirdChannels does not work"),
        (jobs.Plain, {"callbacks": [PipelineTimeline()]}, "PipelineTimeline does not work"),
        (jobs.Plain, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning masks"),
        (Rows, {}, "Adafactor cannot step parts of weights.*leave g_tensor out"),
    ],
)
def test_runs(module: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(module(), **options)


class Planned(nn.Module):
    """As Hugging Face's modules name the plan of all of their parts."""

    tp_plan: dict[str, str] | None = None

    def __init__(self, **styles: str) -> None:
        super().__init__()
        self.inner, self.tp_plan = nn.Linear(2, 2), styles


def test_the_plan_of_a_hugging_face_module_goes_by_names_of_the_whole_module() -> None:
    outer = Planned(**{"inner.*.up": "colwise", "inner.head": "colwise_gather_output"})
    outer.part = Planned(up="rowwise")  # named by the outer one already
    plan = hugging_face_plan(nn.ModuleDict({"network": outer}))
    assert list(plan) == ["network.inner.*.up", "network.inner.head"]
    assert all(isinstance(style, ColwiseParallel) for style in plan.values())
    with pytest.raises(MisconfigurationException, match="Planned wants 'packed_rowwise' for 'up'"):
        hugging_face_plan(Planned(up="packed_rowwise"))


def test_experts_stay_whole_and_norms_of_heads_see_the_heads_of_their_rank() -> None:
    plan = hugging_face_plan(
        Planned(
            **{
                "mlp.experts.gate_up_proj": "packed_colwise",
                "mlp.experts.down_proj": "rowwise",
                "mlp.experts": "moe_tp_experts",
                "mlp.down_proj": "rowwise_split_input",
                "q_norm": "replicated_with_grad_allreduce",
            }
        )
    )
    assert {name: type(style) for name, style in plan.items()} == {
        "mlp.down_proj": RowwiseParallel,
        "q_norm": SequenceParallel,
    }


def test_where_masks_of_dropout_repeat_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(validation, "rank_zero_info", said.append)
    advise_on_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.GRU(2, 2, 2)))
    assert said == []
    advise_on_dropout(nn.Sequential(nn.Dropout(0.1), nn.GRU(2, 2, 2, dropout=0.2)))
    assert "dropout (0.p, 1.dropout) between a column-wise and" in said[0]


class Normed(jobs.Plain):
    """A norm between layers, which with a wrong plan sees a part of the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(4), nn.Linear(8, 4))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        up, norm, down = self.model
        hidden = up(batch)
        return down(norm(hidden.unflatten(-1, (-1, 4))).flatten(-2)).square().mean()


class Tied(jobs.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model[1].weight = self.model[0].weight


def refusals() -> list[str]:
    """The errors of runs that are known on ranks alone."""
    normed = {"model.0": ColwiseParallel(), "model.2": RowwiseParallel()}
    sequence = {"model.0": SequenceParallel()}
    hooked = jobs.Plain()
    hooked.model[0].weight.register_hook(lambda gradient: gradient)
    narrow = jobs.Plain()
    narrow.model[0] = nn.Linear(4, 3)
    narrow.model[1] = nn.Linear(3, 4)
    found = []
    for module, plan in (
        (Normed(), normed),
        (Tied(), PLAN),
        (jobs.Plain(), {"layers.*": ColwiseParallel()}),
        (jobs.Plain(), sequence),
        (hooked, PLAN),
        (narrow, PLAN),
        (Normed(), {"model.1": ColwiseParallel()}),
    ):
        trainer = jobs.trainer(AxoSparseStrategy(g_tensor=2, tensor_plan=plan))
        trainer.strategy.on_exception = lambda exception: None  # It would end the job.
        try:
            trainer.fit(module, jobs.Unequal())
            found.append("")
        except MisconfigurationException as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_plans_that_would_compute_something_else_are_refused() -> None:
    for found in run_ranks(2, refusals):
        differs, tied, unmatched, unsplit, hooked, narrow, unknown = found
        assert "different gradients of 'model.1.weight'" in differs
        assert "splits 'model.0.weight', which is tied to 'model.1.weight'" in tied
        assert "no plan splits a weight" in unmatched
        assert "no plan splits a weight" in unsplit
        assert "'model.0.weight' has a gradient hook" in hooked
        assert "'model.0.weight' of shape (3, 4)" in narrow
        assert "cannot split 'model.1'" in unknown
