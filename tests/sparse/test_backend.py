from __future__ import annotations

import platform

import pytest
import torch

from lightning_axosparse.sparse import backend as backend
from lightning_axosparse.sparse.backend import PROCESSORS, Backend, most_cautious, this_processor


@pytest.mark.parametrize(
    ("machine", "abilities", "processor"),
    [
        ("x86_64", {"amx_tile": True, "avx512_bf16": True}, "matrix"),
        ("AMD64", {"amx_tile": False, "avx512_bf16": True}, "bfloat16"),
        ("x86_64", {"avx512_bf16": False}, "float32"),
        ("aarch64", {"bf16": True}, "unmeasured"),
    ],
)
def test_the_kind_of_a_processor(machine, abilities, processor, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    assert this_processor.__wrapped__() == processor


def test_torch_knows_what_an_x86_processor_can():
    if platform.machine() == "x86_64":
        assert {"amx_tile", "avx512_bf16"} <= torch.cpu.get_capabilities().keys()
    assert this_processor() in PROCESSORS


def test_several_processors_choose_as_the_one_that_gains_least():
    assert most_cautious(["float32", "bfloat16"]) == "bfloat16"
    assert most_cautious(["matrix", "float32", "bfloat16"]) == "matrix"
    assert most_cautious(["matrix", "unmeasured"]) == "unmeasured"
    assert most_cautious(["float32"]) == "float32"


def test_a_processor_chooses_for_itself_unless_several_agreed(monkeypatch):
    monkeypatch.setattr(backend, "this_processor", lambda: "matrix")
    assert Backend("auto").processor == "matrix"
    assert Backend("auto", "bfloat16").processor == "bfloat16"
