import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.planning.memory import DENSE, SPARSE, Storage, dense, samo, sparse
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.accounting import state_bytes
from lightning_axosparse.sparse.formats import FORMATS

SIZE, LAYERS = 512, 2
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def measured(precision: str, policy: str | None, index_format: str = "gaps", ratio: float = 0.9):
    """Bytes of state per weight of some layers of AdamW, after a step and a further pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    inputs = torch.randn(4, SIZE)
    if precision == "bf16-true":
        model, inputs = model.bfloat16(), inputs.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    if policy is not None:
        masks = {}
        for name, parameter in model.named_parameters():
            mask = torch.zeros(parameter.numel(), dtype=torch.bool)
            mask[torch.randperm(mask.numel())[round(ratio * mask.numel()) :]] = True
            masks[name] = mask.view(parameter.shape)
        sparsify(model, masks, optimizer, index_format, policy)
    for _ in range(2):
        dtype = AUTOCAST.get(precision, torch.bfloat16)
        with torch.autocast("cpu", dtype, enabled=precision in AUTOCAST):
            output = model(inputs)
        output.float().square().sum().backward()
        optimizer.step()
    return state_bytes(model, optimizer).total


def predicted(storage: Storage, ratio: float = 0.9) -> float:
    steps = LAYERS * 4  # AdamW counts steps in a float of each parameter
    return storage.state_bytes(LAYERS * SIZE**2, ratio) + steps


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_formulas_give_the_measured_bytes(precision: str) -> None:
    assert measured(precision, None) == predicted(dense(precision), 0.0)
    assert measured(precision, "sparse") == pytest.approx(predicted(sparse()), rel=1e-3)
    assert measured(precision, "samo") == pytest.approx(predicted(samo(precision)), rel=1e-3)


@pytest.mark.parametrize("index_format", FORMATS)
@pytest.mark.parametrize("ratio", [0.5, 0.95])
def test_every_format_takes_what_its_formula_says(index_format: str, ratio: float) -> None:
    found = measured("32-true", "sparse", index_format, ratio)
    assert found == pytest.approx(predicted(sparse(index_format), ratio), rel=1e-3)


@given(ratio=st.floats(0, 0.999))
def test_the_policies_in_words(ratio: float) -> None:
    kept = 1 - ratio
    close = pytest.approx
    assert sparse("coo").state_bytes(1.0, ratio) == close(20 * kept, abs=0.002)
    assert samo("bf16-mixed", "coo").state_bytes(1.0, ratio) == close(20 * kept + 2, abs=0.002)
    assert samo("32-true", "coo").state_bytes(1.0, ratio) == close(20 * kept + 4, abs=0.002)
    assert samo("bf16-true", "gaps").state_bytes(1.0, ratio) == close(17 * kept + 2, abs=0.004)
    assert (SPARSE.state_bytes(1e6, ratio) < DENSE.state_bytes(1e6, 0.0)) == (
        SPARSE.per_weight + 17 * kept < 16
    )


def test_samos_formula() -> None:
    published = Storage(per_weight=2, per_kept=24, gradient=2)
    assert published.state_bytes(1.0, 0.9) == pytest.approx(24 * 0.1 + 2)
    assert published.reduced_bytes(1.0, 0.9) == pytest.approx(0.2)
    assert samo().state_bytes(1.0, 0.9) < published.state_bytes(1.0, 0.9)


def test_what_is_fixed_counts_once() -> None:
    offloaded = Storage(per_weight=4, per_kept=0, gradient=2, fixed=64.0)
    assert offloaded.state_bytes(10, 0.0) == 104


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'fp8' is not known here.*bf16-mixed"):
        dense("fp8")
    with pytest.raises(ValueError, match="'fp8'"):
        samo("fp8")
    with pytest.raises(ValueError, match=r"'csr'.*gaps"):
        sparse("csr")
