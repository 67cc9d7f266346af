"""What torch functions return is found from shapes alone, or they are said to need values."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.overrides import TorchFunctionMode

from lightning_axosparse.pipeline.crossing.placeholder import (
    Outcome,
    TensorDescription,
    Unsendable,
    attribute_tensors,
    reachable_objects,
    run_on_meta,
    sendable,
    values_in,
    with_descriptions,
    with_tensors,
)
from tests.support.test_object_trees import OfTwo

DOES: dict[str, Callable[[Tensor], Any]] = {
    "makes": lambda x: x.exp(),
    "makes another shape": lambda x: x.flatten(1).T,
    "makes several": lambda x: x.chunk(2),
    "makes a copy elsewhere": lambda x: x.to(torch.float16),
    "returns it": lambda x: x.cpu(),
    "returns it, moved nowhere": lambda x: x.to("cpu", torch.float32),
    "changes": lambda x: x.add_(1),
    "changes by an argument": lambda x: functional.relu(x, inplace=True),
    "changes a part": lambda x: x.__setitem__(0, 1.0),
    "tells": lambda x: x.shape,
    "tells by a method": lambda x: x.size(0),
    "tells a length": len,
    "reads a number": lambda x: x.item(),
    "reads a list": lambda x: x.tolist(),
    "reads to index": lambda x: x.nonzero(),
    "reads numpy": lambda x: x.numpy(),
    "reads to print": repr,
    "reads to compare": lambda x: torch.equal(x, x),
}


class First(TorchFunctionMode):
    """Takes the outcome of the first function."""

    outcome: Outcome | None
    done = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self.done:
            self.outcome, self.done = run_on_meta(func, args, kwargs or {}), True
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("does", DOES)
def test_what_a_function_does(does: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.randn(1, 1, 1) if "number" in does else torch.randn(4, 3, 2)
        before, first = x.clone(), First()
        with first:
            result = DOES[does](x)
    outcome = first.outcome
    if does.startswith("reads"):
        assert outcome is None
        return
    assert outcome is not None
    assert outcome.makes_tensors == does.startswith("makes")
    assert [id(each) for each in outcome.changed] == [id(x)] * does.startswith("changes")
    if does.startswith("makes"):
        made = result if isinstance(result, tuple) else (result,)
        described = outcome.result if isinstance(result, tuple) else (outcome.result,)
        if does != "makes another shape":
            assert [TensorDescription.of(each) for each in made] == list(described)
    elif does.startswith("returns") or ("part" not in does and does.startswith("changes")):
        assert outcome.result is x
    if not does.startswith("changes"):
        assert torch.equal(x, before)


def test_what_needs_a_gradient() -> None:
    x = torch.randn(2, requires_grad=True)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            outcome = run_on_meta(torch.exp, (x,), {})
            assert outcome is not None
            assert outcome.result.requires_grad == enabled
    outcome = run_on_meta(torch.argmax, (x,), {})
    assert outcome is not None
    assert not outcome.result.requires_grad


def found(tree: Any) -> list[float]:
    return sorted(float(node) for node in reachable_objects(tree) if isinstance(node, Tensor))


def test_containers_and_objects_are_searched_once() -> None:
    ring: list[Any] = [torch.tensor(0.0)]
    ring.append(ring)
    kept = SimpleNamespace(value=torch.tensor(1.0), others={"a": (deque([torch.tensor(2.0)]),)})
    assert found([ring, kept, {torch.tensor(3.0)}, "text", 4, nn.Linear(1, 1)]) == [0, 1, 2, 3]


def test_attributes_of_submodules_are_searched_and_lightnings_objects_are_not() -> None:
    module, trainer = L.LightningModule(), L.Trainer(logger=False, enable_checkpointing=False)
    module.layers = nn.ModuleList([nn.Linear(1, 1), nn.BatchNorm1d(1)])
    module.layers[0].seen = [torch.tensor(5.0)]
    module.trainer = trainer
    trainer.kept = torch.tensor(6.0)
    values = [float(each) for each in attribute_tensors(module)]
    assert 5.0 in values
    assert 6.0 not in values


def test_code_of_an_earlier_stage_writes_into_what_is_not_sent_and_reads_nothing() -> None:
    left = Unsendable("Intermediates", "layers.0")
    left.layer_type = "a"  # type: ignore[attr-defined]
    left["kind"] = "a"
    assert left == Unsendable("Intermediates", "layers.1")
    assert pickle.loads(pickle.dumps(left)) == left
    for read in (lambda: left.layer_type, lambda: left["kind"]):  # type: ignore[attr-defined]
        with pytest.raises(MisconfigurationException, match="wants an object of type 'Inter"):
            read()


def test_an_object_is_put_together_where_it_arrives_and_not_sent_if_it_cannot_be() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    sent = sendable([packed, OfTwo(torch.ones(2), 1), 5], lambda leaf: leaf == 0, "layers.0")
    data, sizes = values_in(sent)
    assert data is packed.data
    assert sizes == with_descriptions(packed.batch_sizes)
    assert sent[1:] == [Unsendable("OfTwo", "layers.0"), 5]
    assert with_descriptions(sent)[0] == with_descriptions(packed)
    arrived = with_tensors(sent, lambda leaf, value: (packed.data, packed.batch_sizes)[leaf])
    assert isinstance(arrived[0], PackedSequence)
    assert all(map(torch.equal, arrived[0][:2], packed[:2]))
