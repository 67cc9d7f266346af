"""Products by oneDNN are torch's own, also those that it leaves to torch."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_axosparse.support import dense_products
from lightning_axosparse.support.dense_products import cpu_info, onednn_is_faster, without_mkl

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
WIDTH, ROWS = 192, 128
assert ROWS * WIDTH**2 >= dense_products.MIN_MULTIPLICATIONS


@contextmanager
def counted() -> Iterator[list[int]]:
    """Run large products by oneDNN, and list the rows of each that did."""
    rows: list[int] = []
    own = dense_products.onednn_product

    def count(left: Tensor, *others: Any) -> Tensor:
        rows.append(left.shape[0])
        return own(left, *others)

    with pytest.MonkeyPatch.context() as patch, without_mkl():
        patch.setattr(dense_products, "onednn_product", count)
        yield rows


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


LAYOUTS = {
    "rows": lambda m: m.contiguous(),
    "columns": lambda m: m.t().contiguous().t(),
    "padded rows": lambda m: torch.cat((m, m), 1)[:, : m.shape[1]],
    "padded columns": lambda m: torch.cat((m, m), 0).t().contiguous().t()[: m.shape[0]],
    "every other": lambda m: m.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    "unaligned": lambda m: torch.cat((m.new_zeros(3), m.flatten()))[3:].view(m.shape),
    "expanded rows": lambda m: m[:1].expand(m.shape),
    "expanded columns": lambda m: m[:, :1].expand(m.shape),
}
"""Matrices of the same shape with other strides; the expanded ones have other values."""

layouts = st.sampled_from(sorted(LAYOUTS))


@settings(max_examples=40, deadline=None)
@given(
    left=layouts,
    right=layouts,
    rows=st.integers(ROWS, 140),
    way=st.sampled_from(["mm", "mm out", "addmm", "addmm of a matrix", "addmm out", "addmm_"]),
    seed=st.integers(0, 2**31),
)
def test_a_product_is_torchs_with_any_strides(
    left: str, right: str, rows: int, way: str, seed: int
) -> None:
    # Of two expanded matrices, all products are of one sum, which may cancel out.
    assume(not (left.startswith("expanded") and right.startswith("expanded")))
    torch.manual_seed(seed)
    a = LAYOUTS[left](torch.randn(rows, WIDTH))
    b = LAYOUTS[right](torch.randn(WIDTH, WIDTH))
    vector, matrix = torch.randn(2 * WIDTH)[::2], torch.randn(rows, WIDTH)

    def run() -> Tensor:
        out = torch.full((rows, 2 * WIDTH), torch.nan)[:, ::2]
        if way == "mm":
            return a @ b
        if way == "mm out":
            return torch.mm(a, b, out=out)
        if way == "addmm":
            return torch.addmm(vector, a, b)
        if way == "addmm of a matrix":
            return torch.addmm(matrix, a, b)
        if way == "addmm out":
            return torch.addmm(vector, a, b, out=out)
        return matrix.clone().addmm_(a, b)

    expected = run()
    with counted() as calls:
        found = run()
    assert calls == [rows]
    assert found.stride() == expected.stride()
    assert distance(found, expected) < 1e-6


def test_gradients_and_what_they_are_made_of_are_torchs() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, ROWS, WIDTH, requires_grad=True)
    target = torch.randn(2, ROWS, WIDTH)

    def gradients() -> tuple[list[Tensor], list[int]]:
        saved: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = (layer(x) - target).pow(2).sum()
        first = torch.autograd.grad(loss, [x, *layer.parameters()], create_graph=True)
        norm = sum(each.pow(2).sum() for each in first)
        return [*first, *torch.autograd.grad(norm, [x, layer.weight])], saved

    expected, held = gradients()
    with counted() as calls:
        found, also_held = gradients()
    assert len(calls) >= 6
    assert also_held == held
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs) < 1e-6


def test_transforms_and_autocast_find_the_products_that_they_know() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    expected = torch.func.vmap(torch.mm, (0, None))(a, b)
    rounded = torch.mm(a[0].bfloat16(), b.bfloat16())
    with counted() as calls:
        assert distance(torch.func.vmap(torch.mm, (0, None))(a, b), expected) < 1e-6
        assert calls
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.mm(a[0], b), rounded)
        assert not calls
        with torch.inference_mode():
            assert distance(nn.functional.linear(a[0], b.t()), expected[0]) < 1e-6
        assert calls


OTHERS = {
    "small": lambda: torch.randn(ROWS, 16) @ torch.randn(16, WIDTH),
    "few rows": lambda: torch.randn(7, 2048) @ torch.randn(2048, 512),
    "float64": lambda: torch.randn(ROWS, WIDTH).double() @ torch.randn(WIDTH, WIDTH).double(),
    "scaled": lambda: torch.addmm(
        torch.randn(WIDTH), torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), beta=2, alpha=0.5
    ),
    "bias of one": lambda: torch.addmm(
        torch.randn(1), torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_keep_their_bits(name: str) -> None:
    torch.manual_seed(0)
    expected = OTHERS[name]()
    torch.manual_seed(0)
    with counted() as calls:
        assert torch.equal(OTHERS[name](), expected)
    assert not calls


def test_errors_are_torchs() -> None:
    large, small = torch.randn(2048, 2048), torch.randn(2, 2)
    wrong = [
        lambda: torch.mm(large, small),
        lambda: torch.mm(large, large[0]),
        lambda: torch.mm(large, torch.tensor(1.0)),
        lambda: torch.mm(large, large.double()),
        lambda: torch.addmm(large[0, :5], large, large),
        lambda: torch.mm(large, large, out=torch.empty(2048, 2048, dtype=torch.float64)),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError) as expected:
            call()
        with without_mkl(), pytest.raises(RuntimeError) as found:
            call()
        assert str(found.value) == str(expected.value)


def test_torch_has_its_own_kernels_before_and_after() -> None:
    a = torch.randn(ROWS, WIDTH)
    b = torch.randn(WIDTH, WIDTH)

    def operators() -> set[str]:
        with torch.profiler.profile() as profile:
            torch.mm(a, b)
        return {event.key for event in profile.key_averages()}

    expected = a @ b
    assert "mkldnn::_linear_pointwise" not in operators()
    with without_mkl(), without_mkl():
        assert "mkldnn::_linear_pointwise" in operators()
    assert "mkldnn::_linear_pointwise" not in operators()
    assert torch.equal(a @ b, expected)


@pytest.mark.parametrize(
    ("vendor", "flags", "enabled", "shapes", "faster"),
    [
        ("AuthenticAMD", "avx2 avx512f", True, [(64,), (128, 128)], True),
        ("AuthenticAMD", "avx2", True, [(128, 128)], False),
        ("AuthenticAMD", "avx2 avx512f", True, [(2**20,), (64, 64)], False),
        ("AuthenticAMD", "avx2 avx512f", False, [(128, 128)], False),
        ("GenuineIntel", "avx2 avx512f", True, [(128, 128)], False),
        ("", "", True, [(128, 128)], False),
    ],
)
def test_onednn_is_chosen_for_large_weights_on_amd_with_avx512(
    vendor: str,
    flags: str,
    enabled: bool,
    shapes: list[tuple[int, ...]],
    faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = {"vendor_id": vendor, "flags": flags}
    monkeypatch.setattr(dense_products, "cpu_info", lambda: described)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    assert onednn_is_faster(map(torch.Size, shapes)) is faster


def test_linux_describes_an_x86_core():
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("other systems and processors describe themselves otherwise")
    assert cpu_info()["vendor_id"]
    assert "sse2" in cpu_info()["flags"].split()


def test_the_first_core_speaks_for_all(monkeypatch):
    described = "vendor_id\t: AuthenticAMD\nflags\t\t: a b\nbugs\t:\n\nvendor_id\t: Another\n"
    monkeypatch.setattr(Path, "read_text", lambda self: described)
    info = cpu_info.__wrapped__()
    assert (info["vendor_id"], info["flags"], info["bugs"]) == ("AuthenticAMD", "a b", "")


def test_other_systems_describe_nothing(monkeypatch):
    def missing(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_info.__wrapped__()["flags"] == ""
