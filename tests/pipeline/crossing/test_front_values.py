"""Results before the first layer have the same numbers in the batch and in a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.crossing.front_values import FrontValues
from lightning_axosparse.pipeline.crossing.message import Place


def front(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = norm(x.exp())
    x += 1
    return x, x.mean(0)


def places(norm: nn.Module, x: Tensor) -> dict[Place, tuple[int, ...]]:
    values = FrontValues()
    with values:
        results = front(norm, x)
    assert len(results) == 2
    return {place: tuple(result.shape) for place, result in values.alive().items()}


def test_numbers_depend_neither_on_samples_nor_on_the_mode_of_a_norm() -> None:
    norm = nn.BatchNorm1d(3, affine=False)
    of_batch = places(norm, torch.rand(8, 3))
    assert sorted(of_batch.values()) == [(), (3,), (8, 3)], "with the count of the norm's batches"
    of_part = places(norm.eval(), torch.rand(2, 3))
    assert sorted(of_part.values()) == [(2, 3), (3,)], "temporary results are no longer there"
    assert of_part.keys() < of_batch.keys()


def test_results_are_replaced_where_they_are_read() -> None:
    rows: dict[Place, Tensor] = {}

    def of_batch(place: Place, own: Tensor) -> Tensor:
        return rows.setdefault(place, torch.full_like(own, 7.0))

    values = FrontValues(replaces=True)
    x = torch.zeros(2)
    with values:
        y = x + 1
        values.end_front(of_batch)
        total = (y + x).sum()
        y.mul_(2)
        again = torch.cat([y, x])
    assert total == 14, "but not the batch itself"
    assert again.tolist() == [14, 14, 0, 0], "with changes in place"
    assert values.replace({"y": y, "x": x})["y"] is rows[next(iter(rows))]
    assert len(rows) == 1


def test_the_mode_is_left_at_the_first_layer() -> None:
    values = FrontValues()
    with values:
        y = torch.zeros(2) + 1
        values.end_front(lambda place, own: own)
        assert torch.overrides._get_current_function_mode() is None
    assert torch.overrides._get_current_function_mode() is None
    assert next(iter(values.alive().values())) is y
