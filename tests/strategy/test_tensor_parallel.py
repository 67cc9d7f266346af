"""What tensor parallelism cannot do is refused in words, before any rank is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from lightning_axosparse import (
    AxoSparseStrategy,
    EarlyBirdChannels,
    PipelineTimeline,
    TensorParallel,
)
from lightning_axosparse.strategy import validation
from lightning_axosparse.strategy.tensor_parallel import hugging_face_plan, styles_of
from lightning_axosparse.strategy.validation import advise_on_dropout
from tests.faults import jobs
from tests.parity.test_tensor_parallel import Llama
from tests.ranks import run_ranks

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
PLAN = {"model.0": COLUMNS, "model.1": ROWS}
HEADS = {"model.*.q_proj": COLUMNS, "model.*.k_proj": COLUMNS, "model.*.o_proj": ROWS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "loopback"}, "transport='loopback' does not work with tensor_parallel=2"),
        ({"g_inter": 2, "regrid": 1}, "regrid=1 does not work"),
        ({"tensor_parallel": PLAN}, "tensor_parallel={.* must be .*, or a TensorParallel"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AxoSparseStrategy(**{"tensor_parallel": TensorParallel(2, PLAN), **options})


@pytest.mark.parametrize(
    ("ranks", "plan", "message"),
    [
        (0, "auto", "ranks=0 must be"),
        (2, "mine", "plan='mine' must be 'auto', or a dict of torch's styles"),
        (2, None, "plan=None must be"),
        (2, {"model.0": "colwise"}, "'model.0' the style 'colwise', which is none of"),
        (2, {"model.0": ColwiseParallel}, "'model.0' the style <class"),
    ],
)
def test_a_plan_has_ranks_and_styles(ranks: Any, plan: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        TensorParallel(ranks, plan)


class Rows(jobs.Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def fit(module: L.LightningModule, ranks: int = 2, plan: Any = PLAN, **options: Any) -> None:
    split = TensorParallel(2, plan)
    jobs.train(
        module, ranks=ranks, g_inter=1, tensor_parallel=split, **{"callbacks": [], **options}
    )


class LlamaAttention(nn.Module):
    """Projections of an attention layer of four heads, and of one of keys and values."""

    def __init__(self, heads: int = 4, shared: int = 1) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=shared)
        self.head_dim = 2
        self.q_proj, self.k_proj = nn.Linear(8, 2 * heads), nn.Linear(8, 2 * shared)
        self.o_proj = nn.Linear(2 * heads, 8)


class Attends(jobs.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(LlamaAttention())


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (jobs.Plain, {"plan": "auto"}, "there is no plan: no Hugging Face .*configure_model"),
        (jobs.Plain, {"plan": {**PLAN, "net.*.up": ROWS}}, "names 'net.*.up', but Plain has no"),
        (jobs.Plain, {"plan": {"model.0": COLUMNS}}, "'model.0' by columns and no layer by rows"),
        (Attends, {"plan": HEADS}, r"'model.0' .* has 1 key-value heads, which tensor_parallel=2"),
        (jobs.Plain, {"ranks": 3}, r"tensor_parallel=2 .* 3 rank.*\[1, 3\]"),
        (jobs.Plain, {"callbacks": [EarlyBirdChannels(0.5)]}, "EarlyBirdChannels does not work"),
        (jobs.Plain, {"callbacks": [PipelineTimeline()]}, "PipelineTimeline does not work"),
        (jobs.Plain, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning masks"),
        (Rows, {}, "Adafactor cannot step parts of parameters.*leave tensor_parallel out"),
    ],
)
def test_runs(module: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(module(), **options)


def test_llamas_ranks_have_whole_heads_of_keys_and_values() -> None:
    module = Llama()
    assert len(styles_of(module, "auto", 2)) > 1
    with pytest.raises(MisconfigurationException, match=r"LlamaAttention\) has 2 key-value heads,"):
        styles_of(module, "auto", 4)
    perceptron = {"network.model.layers.*.mlp.up_proj": COLUMNS}
    perceptron["network.model.layers.*.mlp.down_proj"] = ROWS
    assert styles_of(module, perceptron, 4) == perceptron


class Planned(nn.Module):
    """As Hugging Face's modules name the plan of all of their parts."""

    tp_plan: dict[str, str] | None = None

    def __init__(self, **styles: str) -> None:
        super().__init__()
        self.inner, self.tp_plan = nn.Linear(2, 2), styles


def test_the_plan_of_a_hugging_face_module_goes_by_names_of_the_whole_module() -> None:
    outer = Planned(**{"inner.*.up": "colwise", "inner.head": "colwise_gather_output"})
    outer.part = Planned(up="rowwise")  # named by the outer one already
    plan = hugging_face_plan(nn.ModuleDict({"network": outer}), 2)
    assert list(plan) == ["network.inner.*.up", "network.inner.head"]
    assert all(isinstance(style, ColwiseParallel) for style in plan.values())
    with pytest.raises(MisconfigurationException, match="Planned wants 'packed_rowwise' for 'up'"):
        hugging_face_plan(Planned(up="packed_rowwise"), 2)


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
        ),
        2,
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


class Makes(jobs.Plain):
    """Makes layers on the ranks."""

    def configure_model(self) -> None:
        self.model[1] = nn.Linear(4, 4)


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
        (Makes(), {"layers.*": ColwiseParallel()}),
        (jobs.Plain(), sequence),
        (hooked, PLAN),
        (narrow, PLAN),
        (Normed(), {"model.1": ColwiseParallel(), "model.2": RowwiseParallel()}),
    ):
        trainer = jobs.trainer(AxoSparseStrategy(tensor_parallel=TensorParallel(2, plan)))
        trainer.strategy.on_exception = lambda exception: None  # It would end the job.
        try:
            trainer.fit(module, jobs.Unequal())
            found.append("")
        except MisconfigurationException as error:
            found.append(str(error))
    return found


class Own(jobs.Plain):
    """Splits its layers itself, each time."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            parallelize_module(self, self.device_mesh["tensor_parallel"], PLAN)


class Listed(nn.Sequential):
    tp_plan: ClassVar = {"0": "colwise", "1": "rowwise"}


class HuggingFace(jobs.Plain):
    """Has a plan as Hugging Face's modules have one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Listed(*self.model)


def call_by_call(make: type[jobs.Plain], plan: Any, ranks: int) -> list[dict[str, Tensor]]:
    """Fit, validate and fit again; the metrics of each call, and the weights in the end."""
    L.seed_everything(0, verbose=False)
    module, found = make(), []
    data = DataLoader(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double(), 4)
    for calls in (("fit", "validate"), ("fit",), ("validate", "fit")):
        strategy = AxoSparseStrategy(tensor_parallel=TensorParallel(ranks, plan))
        run = jobs.trainer(strategy, ranks, precision="64-true")
        for call in calls:
            getattr(run, call)(module, *[data] * (2 if call == "fit" else 1))
            found.append(dict(run.callback_metrics))
    return [*found, module.state_dict()]


WAYS: dict[str, tuple[type[jobs.Plain], Any]] = {
    "a dict": (jobs.Plain, PLAN),
    "configure_model": (Own, "auto"),
    "Hugging Face": (HuggingFace, "auto"),
}


def calls_and_refusals() -> tuple[dict[str, list[dict[str, Tensor]]], list[str]]:
    return {way: call_by_call(*case, 2) for way, case in WAYS.items()}, refusals()


@pytest.fixture(scope="module")
def on_two_ranks() -> list[Any]:
    return run_ranks(2, calls_and_refusals)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_split_again_in_each_call(way: str, on_two_ranks: list[Any]) -> None:
    alone = call_by_call(*WAYS[way], 1)
    assert len({float(metrics["val_loss"]) for metrics in alone[:-1]}) == 3  # It is trained thrice.
    for found, _ in on_two_ranks:
        torch.testing.assert_close(found[way], alone, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_plans_that_would_compute_something_else_are_refused(on_two_ranks: list[Any]) -> None:
    for _, found in on_two_ranks:
        differs, tied, unmatched, unsplit, hooked, narrow, unknown = found
        assert "different gradients of 'model.1.weight'" in differs
        assert "splits 'model.0.weight', which is tied to 'model.1.weight'" in tied
        assert "names 'layers.*', but Makes has no such module" in unmatched
        assert "its plan splits no weight" in unsplit
        assert "'model.0.weight' has a gradient hook" in hooked
        assert "'model.0.weight' of shape (3, 4)" in narrow
        assert "cannot split 'model.1'" in unknown
