"""Modules made in part, without memory, and filled by a state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse.strategy.stages.construction import (
    allocate,
    made_without,
    parameters_on_meta,
    validate_values,
    values_held,
)
from lightning_axosparse.support.deferred_init import DeferredInit


def small(architecture: str) -> Any:
    """A model of transformers, made by its configuration."""
    import transformers

    config = transformers.AutoConfig.for_model(
        architecture,
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=32,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_transformer_made_in_part_is_the_one_that_is_made_whole(architecture: str) -> None:
    torch.manual_seed(1)
    whole, drawn = small(architecture), torch.rand(1)
    torch.manual_seed(1)
    made: list[Any] = []
    with made_without(lambda: last_layer(made[0]).parameters()):
        made.append(small(architecture))
    assert torch.equal(torch.rand(1), drawn)
    absent = {id(parameter) for parameter in last_layer(made[0]).parameters()}
    for (name, one), other in zip(tensors(whole).items(), tensors(made[0]).values(), strict=True):
        assert other.is_meta if id(other) in absent else torch.equal(one, other), name


def last_layer(model: Any) -> nn.Module:
    layers: Any = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    return layers[-1]


def test_a_transformer_is_mapped_from_its_folder(tmp_path: Path) -> None:
    import transformers

    saved = small("llama")
    saved.save_pretrained(tmp_path)
    deferred = DeferredInit()
    with deferred:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    deferred.make_except([])
    for (name, one), other in zip(tensors(saved).items(), tensors(loaded).values(), strict=True):
        assert torch.equal(one, other), name
    mapped = [
        row for row in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in row
    ]
    ranges = [[int(end, 16) for end in row.split()[0].split("-")] for row in mapped]
    weight = loaded.model.layers[1].mlp.up_proj.weight
    assert any(start <= weight.data_ptr() < end for start, end in ranges)


def net() -> nn.Sequential:
    """A net whose first and last weight are one."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def no_tensor(tensor: torch.Tensor) -> bool:
    return False


def test_parameters_on_meta_are_filled_by_a_state_dict() -> None:
    with parameters_on_meta(no_tensor):
        module = net()
    parameters = list(module.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    assert module[2].weight is module[0].weight
    assert module[1].running_var.tolist() == [1, 1, 1]
    allocate(module[0].parameters())
    state = {name: torch.ones(value.shape) for name, value in module.state_dict().items()}
    module.load_state_dict(values_held(state, module))
    assert torch.equal(module[0].weight, torch.ones(3, 3))
    assert module[0].weight is parameters[0]
    assert module[2].bias.is_meta
    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.bias"):
        module.load_state_dict(values_held({**state, "2.bias": torch.ones(4)}, module))


def test_a_state_dict_gives_parameters_without_memory_theirs() -> None:
    torch.manual_seed(0)
    saved = net()
    state = saved.state_dict()
    state["1.weight"] = state["1.weight"].double()
    shared = {state[name].data_ptr() for name in ("0.weight", "0.bias", "1.weight")}
    with parameters_on_meta(lambda tensor: tensor.data_ptr() in shared):
        module = net()
        parameters = list(module.parameters())
        module.load_state_dict(state)
    for (name, one), two in zip(saved.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert (two.dtype, two.requires_grad) == (torch.float32, True), name
    assert [*map(id, module.parameters())] == [*map(id, parameters)]
    assert module[2].weight is module[0].weight
    same = {n for n, p in module.named_parameters() if p.data_ptr() == state[n].data_ptr()}
    assert same == {"0.weight", "0.bias"}, "of other dtypes and tensors there are copies"
    assert not any(part._load_state_dict_pre_hooks for part in module.modules())


def test_a_state_dict_of_other_shapes_or_names_is_refused() -> None:
    with parameters_on_meta(no_tensor):
        module = net()
        for other in ({"2.bias": torch.ones(4)}, {"3.bias": torch.ones(3)}):
            with pytest.raises(RuntimeError, match=r"size mismatch for 2\.bias|Unexpected key"):
                module.load_state_dict({**net().state_dict(), **other})


def load_in_part() -> None:
    state = net().state_dict()
    del state["2.bias"]
    with parameters_on_meta(no_tensor):
        module = net()
        module.load_state_dict(state, strict=False)
        module.to("cpu")


def test_a_module_that_is_moved_without_all_its_values_is_refused() -> None:
    words = r"no values for Linear\.bias of shape \(3,\) and 0 more.*empty_init"
    with pytest.raises(MisconfigurationException, match=words):
        load_in_part()


def fail_with_parameters_on_meta() -> None:
    with parameters_on_meta(no_tensor):
        net()
        raise NotImplementedError("abstract")


def test_other_errors_than_of_values_stay() -> None:
    with pytest.raises(NotImplementedError, match="abstract"):
        fail_with_parameters_on_meta()


def test_a_stage_without_values_is_refused_before_it_computes() -> None:
    parameters = {"a": torch.empty(1), "b": torch.empty(1, device="meta")}
    with pytest.raises(
        MisconfigurationException, match=r"Stage 1 has no values for 'b'.*ckpt_path"
    ):
        validate_values(parameters.items(), 1)
