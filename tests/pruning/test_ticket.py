from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_axosparse.pruning import Ticket


@pytest.fixture
def ticket():
    masks = {"a.weight": torch.eye(4, dtype=torch.bool), "b.weight": torch.ones(2, 2, dtype=bool)}
    return Ticket(masks, 0.6, step=100, distances={90: 0.3, 100: 0.05})


def test_a_mask_that_is_not_bool_is_rejected():
    with pytest.raises(ValueError, match=r"'w'.*float32"):
        Ticket({"w": torch.ones(2, 2)}, 0.5)


def test_properties_and_repr(ticket):
    assert ticket.masks["a.weight"].sum() == 4
    assert ticket.layer_sparsity() == {"a.weight": 0.75, "b.weight": 0.0}
    assert ticket.sparsity == pytest.approx(0.6)
    assert ticket.shapes == {"a.weight": (4, 4), "b.weight": (2, 2)}
    assert ticket.distances == {90: 0.3, 100: 0.05}
    assert repr(ticket) == (
        "Ticket(2 parameters, 60.0% of 20 entries pruned, score=None, step=100)"
    )
    assert list(ticket.part(["b.weight", "bias"])) == ["b.weight"]


@pytest.mark.parametrize("named", [["0.weight"], ["1.weight"], ["1.weight", "0.weight"]])
def test_a_tied_weight_is_fitted_to_its_first_name(named):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    mask, other = torch.eye(4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)
    ticket = Ticket(dict.fromkeys(named, mask) | {"2.weight": other}, 0.5, step=3)
    assert ticket.fitted_to(model) == Ticket({"0.weight": mask, "2.weight": other}, 0.5, step=3)


def test_masks_of_a_tied_weight_that_differ_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    masks = {"0.weight": torch.eye(4, dtype=torch.bool), "1.weight": torch.ones(4, 4).bool()}
    with pytest.raises(ValueError, match="are one tied parameter"):
        Ticket(masks, 0.5).fitted_to(model)


def test_tickets_are_equal_if_their_fields_are(ticket):
    same = Ticket(dict(ticket.masks), 0.6, step=100, distances={90: 0.3, 100: 0.05})
    assert ticket == same == copy.deepcopy(ticket)
    assert ticket != Ticket(dict(ticket.masks), 0.6, step=101, distances={90: 0.3, 100: 0.05})
    assert ticket != Ticket({"a.weight": ticket.masks["a.weight"]}, 0.6)


def test_save_and_load(ticket, tmp_path):
    ticket.save(tmp_path / "best.ticket")
    assert Ticket.load(tmp_path / "best.ticket") == ticket
    assert Ticket.load(str(tmp_path / "best.ticket")) == ticket


def test_files_that_are_no_tickets_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.ticket"):
        Ticket.load(tmp_path / "none.ticket")
    for number, content in enumerate([b"", b"text", pickle.dumps({"format": "other"})]):
        path = tmp_path / f"{number}.ticket"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{number}.ticket' cannot be read"):
            Ticket.load(path)
    torch.save({"state_dict": {}}, tmp_path / "model.ckpt")
    with pytest.raises(ValueError, match=r"model\.ckpt.*has no ticket"):
        Ticket.load(tmp_path / "model.ckpt")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 10))


def test_the_zeros_of_a_model_are_a_ticket():
    model = network()
    with torch.no_grad():
        model[0].weight[:6] = 0
        model[2].bias.zero_()
    ticket = Ticket.from_zeros(model)
    assert ticket.layer_sparsity() == {"0.weight": pytest.approx(0.2)}
    assert ticket.pruning_ratio == pytest.approx(0.2)
    assert torch.equal(ticket.masks["0.weight"], model[0].weight != 0)
    with pytest.raises(ValueError, match="No weight of the module has a zero"):
        Ticket.from_zeros(network())


def test_masks_of_torchs_pruning_are_a_ticket():
    model = network()
    prune.l1_unstructured(model[0], "weight", amount=0.75)
    ticket = Ticket.from_zeros(model)
    assert torch.equal(ticket.masks["0.weight"], model[0].weight_mask.bool())
    prune.remove(model[0], "weight")
    assert Ticket.from_zeros(model) == ticket


def test_the_ticket_of_the_largest_weights():
    model = network()
    ticket = Ticket.magnitude(model, 0.75, which={"head": False})
    assert ticket.layer_sparsity() == {"0.weight": 0.75}
    assert ticket.score == "magnitude"
    weight, mask = model[0].weight.detach().abs(), ticket.masks["0.weight"]
    assert weight[mask].min() > weight[~mask].max()
    alike = Ticket.magnitude(model, 0.5, floor=1.0)
    assert alike.layer_sparsity() == {"0.weight": 0.5, "2.weight": 0.5}
    with pytest.raises(ValueError, match=r"module=.* must be an nn\.Module"):
        Ticket.magnitude(model.state_dict(), 0.75)


def test_a_ticket_is_saved_in_a_folder_that_does_not_exist(tmp_path):
    ticket = Ticket.magnitude(network(), 0.75)
    ticket.save(tmp_path / "tickets" / "early" / "ticket.pt")
    assert Ticket.load(tmp_path / "tickets" / "early" / "ticket.pt") == ticket


def test_a_random_ticket_keeps_as_much_of_each_weight():
    ticket = Ticket.magnitude(network(), 0.6)
    one, again, other = (ticket.random(seed) for seed in (1, 1, 2))
    assert one == again != other
    assert one.layer_sparsity() == ticket.layer_sparsity()
    assert one.score == "random"
    assert ticket.overlap(ticket) == 1
    assert ticket.overlap(one) == one.overlap(ticket)
    densities = [1 - sparsity for sparsity in ticket.layer_sparsity().values()]
    assert min(densities) - 0.1 < ticket.overlap(one) < max(densities) + 0.1
    with pytest.raises(ValueError, match=r"different weights.*2\.weight"):
        ticket.overlap(Ticket.magnitude(network(), 0.5, which={"head": False}))
