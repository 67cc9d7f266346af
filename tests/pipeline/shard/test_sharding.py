import torch
from torch import nn

from lightning_axosparse.pipeline.shard.sharding import Sharding


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.h = nn.Sequential(
            nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        )
        self.h[3].weight = self.h[0].weight
        self.register_buffer("outer", torch.zeros(2))


def split() -> tuple[Model, Sharding]:
    model = Model()
    return model, Sharding(
        model, [f"h.{i}" for i in range(4)], [range(1), range(1, 3), range(3, 4)]
    )


def test_which_stages_keep_what() -> None:
    _, places = split()
    assert {k: set(v) for k, v in places.holders.items()} == {
        "scale": {0, 1, 2},
        "h.0.weight": {0, 2},
        "h.0.bias": {0},
        "h.1.weight": {1},
        "h.1.bias": {1},
        "h.2.weight": {1},
        "h.2.bias": {1},
    }
    assert places.stage_of("h.1.running_mean") == 1
    assert places.stage_of("scale") is None
    assert places.source_of("outer") == 2


def test_each_parameter_is_counted_by_one_stage() -> None:
    counted = []
    for stage in range(3):
        _, places = split()
        places.shard([stage])
        assert places.counted_names() <= set(places.local_parameters())
        counted += places.counted_names()
    assert sorted(counted) == sorted(places.holders)


def test_sharding_frees_the_memory_and_keeps_names_and_shapes() -> None:
    model, places = split()
    keys, shapes = list(model.state_dict()), [p.shape for p in model.parameters()]
    remote = model.h[2].weight
    places.shard([0])
    assert list(model.state_dict()) == keys
    assert [p.shape for p in model.parameters()] == shapes
    assert set(places.local_parameters()) == {"scale", "h.0.weight", "h.0.bias"}
    assert model.h[2].weight.is_meta
    assert model.h[1].running_mean.is_meta
    assert remote.untyped_storage().nbytes() == 0
    assert not model.h[3].weight.is_meta, "tied to a weight that is kept"
    assert not model.outer.is_meta


def test_the_same_parameters_are_put_back() -> None:
    model, places = split()
    before = dict(model.named_parameters())
    places.shard([1])
    assert model.h[0].weight is model.h[3].weight
    assert model.h[0].weight.is_meta
    places.restore_tensors()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.h[3].weight is model.h[0].weight
