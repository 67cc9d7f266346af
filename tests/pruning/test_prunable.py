from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse import sparsify
from lightning_axosparse.pruning.rule import parameter_kinds, prunable


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Model(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.LSTM(4, 4), RMSNorm())
        self.elsewhere = nn.Linear(4, 4, device="meta")
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.table = nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False)


MATRICES = {
    "embedding.weight": (5, 4),
    "layers.0.weight": (4, 4, 3),
    "layers.2.weight_ih_l0": (16, 4),
    "layers.2.weight_hh_l0": (16, 4),
    "elsewhere.weight": (4, 4),
}


def test_by_default_all_that_have_two_dimensions_in_module_order():
    model = Model()
    assert prunable(model) == MATRICES
    masks = {name: torch.ones(shape).cumsum(-1) > 2 for name, shape in MATRICES.items()}
    sparsify(model, {name: mask for name, mask in masks.items() if name != "elsewhere.weight"})
    assert prunable(model) == MATRICES
    assert list(prunable(model)) == [n for n, _ in model.named_parameters() if n in MATRICES]
    assert list(prunable(Model(tied=False))) == [*MATRICES, "head.weight"]


def test_every_parameter_has_a_kind():
    kinds = parameter_kinds(Model(tied=False))
    assert [name for name, kind in kinds.items() if kind == "norm"] == [
        "layers.1.weight",
        "layers.1.bias",
        "layers.3.weight",
    ]
    assert [name for name, kind in kinds.items() if kind == "bias"] == [
        "layers.0.bias",
        "layers.2.bias_ih_l0",
        "layers.2.bias_hh_l0",
        "elsewhere.bias",
    ]
    assert kinds["scale"] == "other"
    assert kinds["head.weight"] == "head"
    assert kinds["embedding.weight"] == parameter_kinds(Model())["embedding.weight"] == "embedding"


def test_a_table_of_kinds_and_patterns_of_which_the_last_counts():
    model = Model(tied=False)
    dense = prunable(model, {"embedding": False, "head": False, "layers.2.*": False})
    assert list(dense) == ["layers.0.weight", "elsewhere.weight"]
    one = prunable(model, {"*": False, "layers.*": True, "bias": False})
    assert list(one) == [
        "layers.0.weight",
        "layers.1.weight",
        "layers.1.bias",
        "layers.2.weight_ih_l0",
        "layers.2.weight_hh_l0",
        "layers.3.weight",
    ]
    assert list(prunable(model, {"weight": False, "head": False, "other": True})) == [
        "scale",
        "embedding.weight",
    ]


def test_a_function_decides_for_all_that_float():
    model = Model(tied=False)
    assert prunable(model, lambda name, parameter: parameter.dim() == 3) == {
        "layers.0.weight": (4, 4, 3)
    }
    named = [name for name, p in model.named_parameters() if p.is_floating_point()]
    assert list(prunable(model, lambda name, parameter: True)) == named


def test_a_key_that_is_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'embeddings' matches no parameter.*kinds weight, emb"):
        prunable(Model(), {"embeddings": False})


@pytest.mark.parametrize(
    "weight_norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_lengths_and_directions_of_weight_norm_are_no_weights(weight_norm) -> None:
    net = nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    kinds = parameter_kinds(net)
    assert {kinds[name] for name in kinds if name.startswith("0.") and "bias" not in name} == {
        "norm"
    }
    assert list(prunable(net)) == ["1.weight"]
