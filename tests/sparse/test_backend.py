from __future__ import annotations

import platform

import pytest

from lightning_axosparse.sparse import backend as backend
from lightning_axosparse.sparse.backend import PROCESSORS, Backend, most_cautious, this_processor


@pytest.mark.parametrize(
    ("machine", "flags", "processor"),
    [
        ("x86_64", "avx512f amx_tile avx512_bf16", "matrix"),
        ("AMD64", "avx512f avx512_bf16", "bfloat16"),
        ("x86_64", "avx2 amx_tile_of_another_name", "float32"),
        ("x86_64", "", "float32"),
        ("aarch64", "asimd bf16", "dense"),
    ],
)
def test_the_kind_of_a_processor(machine, flags, processor, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(backend, "cpu_info", lambda: {"flags": flags})
    assert this_processor.__wrapped__() == processor


def test_the_kind_of_this_processor_is_known():
    assert this_processor() in PROCESSORS


def test_several_processors_choose_as_the_one_that_gains_least():
    assert most_cautious(["float32", "bfloat16"]) == "bfloat16"
    assert most_cautious(["matrix", "float32", "bfloat16"]) == "matrix"
    assert most_cautious(["matrix", "few"]) == "few"
    assert most_cautious(["few", "dense"]) == "dense"
    assert most_cautious(["float32"]) == "float32"


def test_a_processor_chooses_for_itself_unless_several_agreed(monkeypatch):
    monkeypatch.setattr(backend, "this_processor", lambda: "matrix")
    assert Backend("auto").processor == "matrix"
    assert Backend("auto", "bfloat16").processor == "bfloat16"
