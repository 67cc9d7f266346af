"""What a forward hook leaves behind of what it is given, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.forward_hooks import call_hook

KEPT: list[Any] = []
# The hook, and which of (input, first output, second output) something is left of.
HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "looks at a shape": (lambda m, args, out: KEPT.append(out[0].shape), ""),
    "reads a number": (lambda m, args, out: KEPT.append(out[0].sum().item()), ""),
    "raises if not finite": (lambda m, args, out: assert_finite(out[0]), ""),
    "changes an output": (lambda m, args, out: (out[0] * 2, out[1]), ""),
    "changes by an input": (lambda m, args, out: (out[0] + args[0], out[1]), ""),
    "returns what it was given": (lambda m, args, out: out, ""),
    "returns a part of it": (lambda m, args, out: out[1], ""),
    "keeps a parameter": (lambda m, args, out: KEPT.append(m.weight * 2), ""),
    "keeps the input": (lambda m, args, out: KEPT.append(args[0]), "i"),
    "keeps the tuple": (lambda m, args, out: KEPT.append(out), "ab"),
    "keeps one output": (lambda m, args, out: KEPT.append(out[1]), "b"),
    "keeps and returns": (lambda m, args, out: (KEPT.append(out[1]), out)[1], "b"),
    "keeps a view": (lambda m, args, out: KEPT.append(out[0][1:]), "a"),
    "keeps a detached": (lambda m, args, out: KEPT.append(out[0].detach()), "a"),
    "keeps data": (lambda m, args, out: KEPT.append(out[0].data), "a"),
    "keeps numpy": (lambda m, args, out: KEPT.append(out[0].detach().numpy()), "a"),
    "keeps a sum of both": (lambda m, args, out: KEPT.append((out[0] + out[1]).sum()), "ab"),
    "keeps a function of a list": (lambda m, args, out: KEPT.append(torch.cat(out)), "ab"),
    "adds to a sum": (lambda m, args, out: (TOTAL.add_(out[0].detach().sum()), None)[1], "a"),
    "keeps one and changes": (lambda m, args, out: (KEPT.append(out[0].exp()), out[1])[1], "a"),
}
TOTAL = torch.zeros(())


def assert_finite(tensor: Tensor) -> None:
    assert tensor.isfinite().all()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("does", HOOKS)
def test_what_a_hook_leaves_behind(does: str, grad: bool) -> None:
    KEPT.clear()
    hook, expected = HOOKS[does]
    module = nn.Linear(2, 2)
    with torch.set_grad_enabled(grad):
        given = {name: torch.randn(3, 2, requires_grad=grad) * 1 for name in "iab"}
        arguments = (given["i"],), (given["a"], given["b"])
        returned, read = call_hook(hook, module, arguments)
    assert {name for name, tensor in given.items() if id(tensor) in read} == set(expected)
    assert len(read) == len(expected)
    if "return" in does or "change" in does:
        assert returned is not None


def test_an_error_of_a_hook_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        call_hook(lambda module, args, out: 1 / 0, nn.Identity(), ((), torch.ones(1)))
