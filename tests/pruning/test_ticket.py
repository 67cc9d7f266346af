from __future__ import annotations

import copy
import pickle

import pytest
import torch

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
        "Ticket(2 parameters, 60.0% of 20 entries pruned, score=None, scope='global', step=100)"
    )
    assert list(ticket.part(["b.weight", "bias"])) == ["b.weight"]


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
    with pytest.raises(ValueError, match=r"model\.ckpt.*not a ticket"):
        Ticket.load(tmp_path / "model.ckpt")
