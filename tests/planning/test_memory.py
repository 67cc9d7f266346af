import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.planning.memory import DENSE, SPARSE, Storage


def test_dense_state_is_a_weight_its_gradient_and_two_moments() -> None:
    assert DENSE.state_bytes(1000, 0.0) == 1000 * (4 + 4 + 8)


@given(ratio=st.floats(0, 0.999))
def test_sparse_state_breaks_even_at_a_fifth_pruned(ratio: float) -> None:
    assert (SPARSE.state_bytes(1e6, ratio) < DENSE.state_bytes(1e6, 0.0)) == (20 * (1 - ratio) < 16)


def test_samos_formula() -> None:
    samo = Storage(per_weight=2, per_kept=24, gradient=2)
    assert samo.state_bytes(1.0, 0.9) == pytest.approx(24 * 0.1 + 2)
    assert samo.reduced_bytes(1.0, 0.9) == pytest.approx(0.2)


def test_what_is_fixed_counts_once() -> None:
    offloaded = Storage(per_weight=4, per_kept=0, gradient=2, fixed=64.0)
    assert offloaded.state_bytes(10, 0.0) == 104
