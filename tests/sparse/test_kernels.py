from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.support import compilation
from lightning_axosparse.support.trace import clock

ROOT = Path(__file__).parents[2]


def test_kernels_account_for_their_time():
    clock.totals.clear()
    layout = layout_of(torch.eye(2, dtype=torch.bool))
    [tile] = layout.tiles
    dense, values = torch.empty(4), torch.empty(2)
    layout.densify_tile(tile, torch.tensor([1.0, 2.0]), dense)
    assert dense.tolist() == [1, 0, 0, 2]
    assert clock.totals["densify"] > 0
    assert clock.totals["compress"] == 0
    layout.compress_tile(tile, dense, values)
    assert values.tolist() == [1, 2]
    assert clock.totals["compress"] > 0


def test_scatter_and_gather_are_differentiable():
    indices = torch.tensor([1, 2], dtype=torch.int32)
    values = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda v: reference.gather(reference.scatter(v, indices, (2, 2)).square(), indices), values
    )


def test_fused_kernels_agree_with_the_reference():
    """In a process of its own: Triton asks whether to interpret when it is first imported."""
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("fused_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("operation", ["densify", "compress"])
def test_fused_kernels_compile_for_a_gpu(operation, dtype):
    """For compute capability 9.0 (an H100), which no GPU is needed for."""
    triton = pytest.importorskip("triton")
    from lightning_axosparse.sparse.kernels import fused

    kernel = getattr(fused, f"_{operation}_bits")
    signature = {"values": dtype, "dense": dtype, "starts": "*i32", "first": "i32", "numel": "i32"}
    signature |= {"bits": "*u8", "block": "i32", "CHUNK": "constexpr"}
    assert list(signature) == kernel.arg_names
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs={"CHUNK": 1024})
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    assert triton.compile(source, target=target).asm["cubin"]


def test_compilation_is_said_once_and_what_is_loaded_is_not(monkeypatch):
    said = []
    monkeypatch.setattr(compilation, "rank_zero_info", said.append)

    @numba.njit
    def one(x):
        return x + 1

    @numba.njit
    def two(x):
        return one(x) + 1

    with compilation.compilation():
        assert two(1) == 3
        assert two(1.0) == 3.0
    assert said == ["Compiling loops: only the first time on a machine."]
    with compilation.compilation():
        assert two(1) == 3  # compiled before
    assert len(said) == 1
