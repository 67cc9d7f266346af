from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_axosparse.sparse.store.formats import BitmapLayout

triton = pytest.importorskip("triton")

from benchmarks.gpu import bitmap_product  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_products_with_a_bitmap_are_those_with_the_dense_weight():
    """In a process of its own: Triton asks whether to interpret when it is first imported."""
    cases = Path(__file__).with_name("bitmap_product.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("ones", [(), ("tokens", "block_rows")])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp16"])
def test_the_kernel_compiles_for_tensor_cores(dtype, ones):
    """For compute capability 9.0 (an H100), which no GPU is needed for.

    A launch makes constants of the arguments that are one.
    """
    kernel = bitmap_product._times_transposed
    types = {"bits": "*u8", "starts": "*i32"}
    types |= dict.fromkeys(("values", "inputs", "results"), dtype)
    constants = dict.fromkeys(ones, 1) | {"ROWS": 64, "COLUMNS": 64, "TOKENS": 16}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target)
    assert compiled.asm["cubin"]
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in compiled.asm["ptx"]


def test_rows_must_have_whole_words():
    layout = BitmapLayout.from_mask(torch.ones(4, 40, dtype=torch.bool))
    inputs, values, cut = torch.zeros(1, 40), torch.zeros(160), bitmap_product.Cut(16, 32, 1)
    with pytest.raises(ValueError, match="40 columns"):
        bitmap_product.spmm_t(inputs, values, layout, cut)
