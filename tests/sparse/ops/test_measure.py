from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse import sparsify
from lightning_axosparse.sparse import backend
from lightning_axosparse.sparse.backend import PROCESSORS
from lightning_axosparse.sparse.ops import measure
from lightning_axosparse.sparse.ops.measure import measured_processor


@pytest.fixture(autouse=True)
def uncached():
    yield
    measured_processor.cache_clear()
    measure._one_is_faster.cache_clear()


@pytest.fixture
def other(monkeypatch):
    """A processor of which nothing is known."""
    measured_processor.cache_clear()
    monkeypatch.setattr(measure, "this_processor", lambda: "dense")
    monkeypatch.setattr(backend, "this_processor", lambda: "dense")


def faster_up_to(monkeypatch, limit, in_16_bits):
    """Let products on unpruned values be faster up to a density, and up to another in 16 bits."""

    def is_faster(product, density, dtype):
        return density <= (limit if dtype == torch.float32 else in_16_bits)

    monkeypatch.setattr(measure, "_one_is_faster", is_faster)


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize(
    ("limit", "in_16_bits", "kind"),
    [
        (1.0, 1.0, "float32"),
        (1.0, 0.3, "matrix"),  # a single token is not faster
        (0.3, 0.0, "dense"),
        (0.0, 0.0, "dense"),
    ],
)
def test_the_kind_is_the_one_whose_limits_are_reached(limit, in_16_bits, kind, monkeypatch):
    faster_up_to(monkeypatch, limit, in_16_bits)
    assert measured_processor() == kind


@pytest.mark.usefixtures("other")
def test_a_single_token_may_decide(monkeypatch):
    def is_faster(product, density, dtype):
        return dtype == torch.float32 and (product == "one_token" or density <= 0.25)

    monkeypatch.setattr(measure, "_one_is_faster", is_faster)
    assert measured_processor() == "few"


@pytest.mark.usefixtures("other")
def test_a_module_is_made_sparse_for_the_kind_that_is_measured():
    kind = measured_processor()
    assert kind in PROCESSORS
    layer = nn.Linear(64, 64)
    sparsify(layer, {"weight": torch.rand(64, 64) < 0.1})
    assert layer._stored["weight"].form.backend == ("auto", kind)
    assert layer._stored["weight"].form.backend.processor == kind


def test_a_processor_that_flags_describe_is_not_measured(monkeypatch):
    measured_processor.cache_clear()
    monkeypatch.setattr(measure, "this_processor", lambda: "bfloat16")
    monkeypatch.setattr(measure, "_one_is_faster", pytest.fail)
    assert measured_processor() is None
