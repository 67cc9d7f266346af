from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_axosparse.pruning import Ticket
from lightning_axosparse.sparse import densify, sparsify
from lightning_axosparse.sparse.module import convert
from lightning_axosparse.sparse.module.parameters import layouts
from lightning_axosparse.sparse.store.formats import FORMATS
from tests.sparse.masking import Tied, apply_masks, random_masks


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


@pytest.fixture
def masks(model):
    return random_masks(model)


@pytest.fixture
def masked(model, masks):
    dense = copy.deepcopy(model)
    apply_masks(dense, masks)
    return dense


def test_the_parameter_is_the_same_object_under_the_same_name(model, masks):
    before = dict(model.named_parameters())
    sparsify(model, masks)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in after)
    assert after["0.weight"].shape == (int(masks["0.weight"].sum()),)
    assert after["0.bias"].shape == (8,)


def test_a_layer_keeps_its_kind_and_a_readable_name(model, masks):
    sparsify(model, masks)
    assert isinstance(model[0], nn.Linear)
    assert type(model[0]).__name__ == "SparseLinear"
    assert type(model[0]) is type(model[3])
    assert model[0].weight.shape == (8, 6)
    assert "in_features=6" in repr(model)


def test_densify_gives_the_module_back(model, masks, masked):
    sparsify(model, masks)
    densify(model)
    assert type(model[0]) is nn.Linear
    assert vars(model[0]).keys() == vars(masked[0]).keys()
    for (name, one), other in zip(model.named_parameters(), masked.parameters(), strict=True):
        assert isinstance(one, nn.Parameter)
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("compute", "warned"), [("sparse", ["'1' is compiled"]), ("dense", [])])
def test_compiled_layers_are_warned_of(compute, warned, recwarn):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].compile()
    sparsify(model, random_masks(model), compute=compute)
    said = [str(each.message).partition(":")[0] for each in recwarn]
    assert [text for text in said if "is compiled" in text] == warned


def test_recurrent_modules_come_back_too():
    rnn, inputs = nn.LSTM(4, 3), torch.randn(5, 2, 4)
    masks = random_masks(rnn)
    dense = copy.deepcopy(rnn)
    apply_masks(dense, masks)
    sparsify(rnn, masks)
    densify(rnn)
    assert torch.equal(rnn(inputs)[0], dense(inputs)[0])
    assert all(flat is own for flat, own in zip(rnn._flat_weights, rnn.parameters(), strict=True))


def test_gradients_and_frozen_parameters_are_swapped_too(model, masks, masked):
    model[3].weight.requires_grad_(False)
    model(torch.ones(2, 6)).sum().backward()
    gradient = model[0].weight.grad.clone()
    sparsify(model, masks)
    parameters = dict(model.named_parameters())
    assert torch.equal(parameters["0.weight"].grad, gradient[masks["0.weight"]])
    assert parameters["3.weight"].grad is None
    assert not model[3].weight.requires_grad
    densify(model)
    assert torch.equal(model[0].weight.grad, gradient * masks["0.weight"])


def test_hooks_on_the_gradient_go_on_firing(model, masks):
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    held = model[0].weight.view_as(model[0].weight).grad_fn  # as a reducer holds it
    for _ in range(2):
        model(torch.randn(2, 6)).sum().backward()
        sparsify(model, masks)
    assert held is not None
    assert seen == [(8, 6), (int(masks["0.weight"].sum()),)]


def test_state_dicts_are_dense_under_the_ordinary_names(model, masks, masked):
    sparsify(model, masks)
    state = model.state_dict()
    assert list(state) == list(masked.state_dict())
    for name, tensor in masked.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert state["0.weight"].requires_grad is False
    assert model.state_dict(keep_vars=True)["0.weight"].requires_grad
    assert [name for name, _ in model.named_buffers()] == [n for n, _ in masked.named_buffers()]


@pytest.mark.parametrize("assign", [False, True])
def test_loading_takes_dense_tensors_and_drops_what_is_pruned(model, masks, assign):
    source = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    state = source.state_dict()
    sparsify(model, masks)
    result = model.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert state["0.weight"].shape == (8, 6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name] * masks.get(name, 1)), name
    assert isinstance(dict(model.named_parameters())["0.weight"], nn.Parameter)


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16])
def test_an_assigned_tensor_decides_the_dtype_and_values_stay_float32(model, masks, before):
    model.to(before)
    state = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    sparsify(model, masks)
    model.load_state_dict(state.bfloat16().state_dict(), assign=True)
    assert model[0].weight.dtype == torch.bfloat16
    assert dict(model.named_parameters())["0.weight"].dtype == torch.float32
    assert torch.equal(model.state_dict()["0.weight"], state[0].weight * masks["0.weight"])


def test_loading_names_what_does_not_fit(model, masks):
    sparsify(model, masks)
    state = model.state_dict()
    state["0.weight"] = torch.zeros(6, 8)
    with pytest.raises(RuntimeError, match=r"0\.weight.*\(8, 6\).*\(6, 8\)"):
        model.load_state_dict(state)
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "named", [["embedding.weight"], ["head.weight"], ["embedding.weight", "head.weight"]]
)
def test_tied_parameters_stay_tied(named):
    model = Tied()
    mask = torch.rand(11, 8) < 0.5
    sparsify(model, dict.fromkeys(named, mask))
    values = dict(model.named_parameters(remove_duplicate=False))
    assert values["embedding.weight"] is values["head.weight"]
    assert list(layouts(model)) == ["embedding.weight"]
    for tied in (model, copy.deepcopy(model)):
        assert tied.embedding.weight.sparse_layout is tied.head.weight.sparse_layout
        with torch.no_grad():
            tied.embedding.weight.fill_(3.0)
        assert torch.equal(tied.head.weight + 0, 3.0 * mask)
    densify(model)
    assert model.embedding.weight is model.head.weight
    assert type(model.head) is nn.Linear


def test_conversions_of_the_whole_module(model, masks):
    sparsify(model, masks)
    assert model.double()[0].weight.dtype == torch.float64
    model.to("meta")
    assert model[0].weight.is_meta
    assert all(layout.starts.is_meta for layout in layouts(model).values())


def test_a_second_swap_adds_parameters_and_accepts_the_same_mask(model, masks):
    first = {"0.weight": masks["0.weight"]}
    sparsify(model, first)
    layout = layouts(model)["0.weight"]
    sparsify(model, masks)
    assert list(layouts(model)) == ["0.weight", "3.weight"]
    assert layouts(model)["0.weight"] is layout


def test_several_parameters_of_one_module_one_after_the_other():
    model = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
    masks = random_masks(model)
    for name, mask in masks.items():
        sparsify(model, {name: mask})
    assert layouts(model).keys() == masks.keys()


def assert_raises(model, masks, message):
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        sparsify(model, masks)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before


def test_wrong_masks_raise_and_change_nothing(model, masks):
    assert_raises(model, {**masks, "0.wieght": masks["0.weight"]}, "'0.wieght'.*0.weight")
    assert_raises(
        model, {**masks, "3.weight": masks["0.weight"]}, r"'3.weight'.*\(8, 6\).*\(4, 8\)"
    )
    assert_raises(model, {**masks, "3.weight": masks["3.weight"].float()}, "'3.weight'.*bool")
    assert_raises(
        model, {**masks, "3.weight": masks["3.weight"].numpy()}, "'3.weight'.*not ndarray"
    )
    model[3].weight = nn.Parameter(torch.ones(4, 8, dtype=torch.int32), requires_grad=False)
    assert_raises(model, masks, "'3.weight'.*int32")
    model[3].to("meta")
    assert_raises(model, masks, "'3.weight'.*meta")


def test_another_mask_raises(model, masks):
    sparsify(model, masks)
    assert_raises(model, {"0.weight": ~masks["0.weight"]}, "'0.weight'.*already.*densify")
    more = masks["0.weight"].clone()
    more.view(-1)[more.view(-1).logical_not().nonzero()[0]] = True
    assert_raises(model, {"0.weight": more}, "'0.weight'.*already.*densify")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", ["auto", "samo"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_fewer_of_the_kept_entries_may_be_kept(make, compute, dtype):
    torch.manual_seed(0)
    model = Tied().to(dtype)
    once = copy.deepcopy(model)
    first = {"head.weight": torch.rand(11, 8) < 0.7}
    fewer = {"embedding.weight": first["head.weight"] & (torch.rand(11, 8) < 0.5)}

    def step(net, optimizer):
        optimizer.zero_grad()
        net.head(net.embedding(torch.arange(11))).float().square().mean().backward()
        optimizer.step()

    optimizers = [make(net.parameters(), 0.1) for net in (model, once)]
    for net, optimizer in zip((model, once), optimizers, strict=True):
        sparsify(net, first, optimizer, compute=compute)
        step(net, optimizer)
    sparsify(model, fewer, optimizers[0], compute=compute)
    [count] = {int(mask.sum()) for mask in fewer.values()}
    weight = dict(model.named_parameters())["embedding.weight"]
    assert weight.shape == weight.grad.shape == (count,)
    assert all(value.shape in ((), (count,)) for value in optimizers[0].state[weight].values())
    # As if they had been pruned from what the first mask had made of them.
    densify(once, optimizers[1])
    sparsify(once, fewer, optimizers[1], compute=compute)
    for _ in range(3 if dtype is torch.float32 else 1):  # to be dense rounds master weights
        assert torch.equal(model.embedding.weight.dense(), once.embedding.weight.dense())
        for net, optimizer in zip((model, once), optimizers, strict=True):
            step(net, optimizer)


def test_two_masks_of_one_tied_parameter_raise():
    mask = torch.rand(11, 8) < 0.5
    assert_raises(Tied(), {"embedding.weight": mask, "head.weight": ~mask}, "embedding.*head.*tied")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(8, 6, dtype=torch.bool, device="meta"), "meta device"),
        (torch.ones(8, 6, dtype=torch.bool).to_sparse(), r"sparse_coo.*to_dense"),
        (torch.ones(8, 6).to_sparse_csr().bool(), r"sparse_csr.*to_dense"),
        (None, "NoneType"),
        ([[True] * 6] * 8, "list"),
    ],
)
def test_a_mask_without_dense_bools_raises(model, masks, mask, message):
    assert_raises(
        model, {"3.weight": masks["3.weight"], "0.weight": mask}, f"'0.weight'.*{message}"
    )
    with pytest.raises(ValueError, match=f"'0.weight'.*{message}"):
        Ticket({"0.weight": mask}, 0.5)


def test_a_name_that_is_no_text_raises(model, masks):
    assert_raises(model, {0: masks["0.weight"]}, "no parameter '0'")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("index_format", FORMATS)
def test_masks_that_keep_nothing_or_all_train_as_masked_dense_weights_do(
    keep, index_format, monkeypatch
):
    monkeypatch.setattr(convert, "layout_of", FORMATS[index_format].from_mask)
    torch.manual_seed(0)
    sparse = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    dense = copy.deepcopy(sparse)
    mask = torch.full((8, 6), keep)
    with torch.no_grad():
        dense[0].weight *= mask
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (sparse, dense)]
    sparsify(sparse, {"0.weight": mask}, optimizers[0])
    x = torch.randn(5, 6)
    for _ in range(3):
        for each, optimizer in zip((sparse, dense), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            if each is dense:
                each[0].weight.grad *= mask
            optimizer.step()
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(sparse.state_dict()[name], value)
    densify(sparse, optimizers[0])
    torch.testing.assert_close(sparse[0].weight, dense[0].weight)


def test_tied_weights_have_one_dense_copy_when_more_is_pruned():
    model = Tied()
    half, fewer = (torch.arange(88).view(11, 8) % n == 0 for n in (2, 4))
    sparsify(model, {"embedding.weight": half}, compute="samo")
    sparsify(model, {"embedding.weight": fewer}, compute="samo")
    forms = [layer._stored["weight"].form for layer in (model.embedding, model.head)]
    assert forms[0] is forms[1]
    assert forms[0].copy is not None


def test_entries_that_a_load_drops_are_named():
    module = nn.Sequential(nn.Linear(4, 4))
    state = module.state_dict()
    sparsify(module, {"0.weight": torch.eye(4, dtype=bool)})
    with pytest.warns(UserWarning, match=r"'0\.weight' are dropped.*densify\(module\) first"):
        module.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict(module.state_dict())
