"""Experts that cannot be spread are refused in words, before any rank is started."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, ExpertParallel, PipelineTimeline
from lightning_axosparse.strategy.expert_parallel import (
    SpreadExperts,
    expert_layers,
)
from tests.faults import jobs
from tests.parity.test_expert_parallel import LAYERS, Adapted, Experts, Mixtral, Own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "loopback"}, "transport='loopback' does not work with expert_parallel=2"),
        ({"g_inter": 2, "regrid": 1}, "regrid=1 does not work"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AxoSparseStrategy(**{"expert_parallel": 2, **options})


@pytest.mark.parametrize(
    ("ranks", "experts", "message"),
    [(0, "auto", "ranks=0 must be"), (2, 3, "experts=3 must be"), (2, None, "experts=None must")],
)
def test_experts_have_ranks_and_names(ranks: Any, experts: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ExpertParallel(ranks, experts)


class Adafactor(Own):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Own, {"experts": "auto"}, "no Hugging Face module in it has a plan"),
        (Own, {"experts": "layers.*.experts"}, "it has no module 'layers"),
        (Own, {"ranks": 3}, r"expert_parallel=2 .* do not divide the 3 replicas.*\[1, 3\]"),
        (Own, {"over": 3, "ranks": 3}, "'blocks.0.experts' has 4 experts, which expert_parallel=3"),
        (Own, {"experts": "blocks.*.norm"}, "'blocks.0.norm'.* its `forward` takes input"),
        (Own, {"callbacks": [PipelineTimeline()]}, "PipelineTimeline does not work with expert_p"),
        (Adafactor, {}, "Adafactor cannot step parts of parameters.*leave expert_parallel out"),
    ],
)
def test_runs(module: type[L.LightningModule], options: dict[str, Any], message: str) -> None:
    experts = options.pop("over", 2), options.pop("experts", "blocks.*.experts")
    options = {"callbacks": [], "ranks": 2, "pipeline": "blocks", "g_inter": 1, **options}
    with pytest.raises(MisconfigurationException, match=message):
        jobs.train(module(), expert_parallel=ExpertParallel(*experts), **options)


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.ones(4, 2, 2)), nn.Parameter(torch.ones(2))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class Nothing(Slices):
    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (Slices(), "'scale' has no slice for each of 4 experts"),
        (Nothing(), "it has neither parameters of its own nor an nn.ModuleList"),
    ],
)
def test_modules(experts: nn.Module, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        expert_layers(nn.ModuleDict({"experts": experts}), "experts", 1)


class Alone:
    """A group of two ranks, of which this is the first."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module[1].experts.register_parameter("up", module[0].up), "it is tied to"),
        (lambda module: module[0].up.register_hook(lambda g: g), "it has a gradient hook"),
    ],
)
def test_parameters(change: Any, message: str) -> None:
    from lightning_axosparse.sparse.module.parameters import owned_parameters

    module = nn.ModuleList([Slices(), nn.ModuleDict({"experts": Slices()})])
    del module[0].scale
    change(module)
    spread = SpreadExperts(module, "0", Alone())  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match=message):
        spread.split_parameters({entry.names[0]: entry for entry in owned_parameters(module)})


def test_adapters_of_parameters_are_divided_with_the_experts() -> None:
    layer = expert_layers(Adapted(), "auto", 1)[0]
    divided = {n.removeprefix(f"{layer.path}."): rest for n, *rest in layer.split_sizes(2)}
    assert divided == {
        "base_layer.base_layer.gate_up_proj": [0, [2, 2]],
        "base_layer.base_layer.down_proj": [0, [2, 2]],
        **{f"{at}lora_A.default.weight": [0, [4, 4]] for at in ("", "base_layer.")},
        **{f"{at}lora_B.default.weight": [1, [2, 2]] for at in ("", "base_layer.")},
    }
    with pytest.raises(MisconfigurationException, match="one of 4 experts of 'network"):
        expert_layers(Adapted(), "auto", 4)


def test_patterns_match_words_of_names() -> None:
    assert [each.path for each in expert_layers(Own(), "blocks.*.experts", 1)] == [
        f"blocks.{number}.experts" for number in range(LAYERS)
    ]
    found = expert_layers(Mixtral(), "auto", 1)
    names = [[name for _, name in each.count_attributes] for each in found]
    assert [(each.path, each.expert_count, each.expert_list) for each in found] == [
        (f"network.model.layers.{number}.mlp.experts", 4, None) for number in range(LAYERS)
    ]
    assert names == [["num_experts"]] * LAYERS
    assert isinstance(expert_layers(Experts(), "", 1)[0].expert_list, nn.ModuleList)
