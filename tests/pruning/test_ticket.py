from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.pruning import Ticket
from lightning_axosparse.pruning.packed import PackedMasks

shapes = st.dictionaries(
    st.sampled_from(["a", "b.weight", "c.0.weight"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
)


def masks_of(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) < 0.5 for name, shape in shapes.items()}


@pytest.fixture
def ticket():
    masks = {"a.weight": torch.eye(4, dtype=torch.bool), "b.weight": torch.ones(2, 2, dtype=bool)}
    return Ticket(masks, 0.6, epoch=4, step=100, distances=[0.3, 0.05])


def assert_holds(packed, masks):
    assert list(packed) == list(masks)
    assert len(packed) == len(masks)
    for name, mask in masks.items():
        assert packed[name].dtype == torch.bool
        assert torch.equal(packed[name], mask)
        assert packed.shapes[name] == mask.shape


@given(shapes, st.integers(0, 1000))
def test_packed_masks_hold_what_they_were_given(shapes, seed):
    masks = masks_of(shapes, seed)
    packed = PackedMasks(masks)
    assert_holds(packed, masks)
    assert_holds(PackedMasks.from_state_dict(packed.state_dict()), masks)
    assert_holds(pickle.loads(pickle.dumps(packed)), masks)
    names = list(masks)[::-1][:2]
    assert_holds(packed.only([*names, "elsewhere"]), {name: masks[name] for name in names})
    merged = PackedMasks.merged([packed.only([name]) for name in masks])
    assert merged == packed
    assert packed == PackedMasks(masks)


def test_packed_masks_differ_by_bits_names_and_shapes():
    packed = PackedMasks(masks_of({"a": [3, 4]}))
    flipped = {"a": packed["a"].clone()}
    flipped["a"][0, 0] ^= True
    assert packed != PackedMasks(flipped)
    assert packed != PackedMasks({"b": packed["a"]})
    assert packed != PackedMasks({"a": packed["a"].view(4, 3)})
    assert packed != {"a": packed["a"]}


def test_masks_take_one_bit_an_entry():
    masks = {"w": torch.ones(64, 64, dtype=torch.bool)}
    assert PackedMasks(masks).state_dict()["bits"]["w"].nbytes == 64 * 64 // 8


def test_a_mask_that_is_not_bool_is_refused():
    with pytest.raises(ValueError, match=r"'w'.*float32"):
        Ticket({"w": torch.ones(2, 2)}, 0.5)


def test_what_a_ticket_says(ticket):
    assert ticket.masks["a.weight"].sum() == 4
    assert ticket.layer_sparsity() == {"a.weight": 0.75, "b.weight": 0.0}
    assert ticket.sparsity == pytest.approx(0.6)
    assert ticket.shapes == {"a.weight": (4, 4), "b.weight": (2, 2)}
    assert ticket.distances == (0.3, 0.05)
    assert repr(ticket) == (
        "Ticket(2 parameters, 60.0% of 20 entries pruned, scope='global', epoch=4, step=100)"
    )
    assert list(ticket.part(["b.weight", "bias"])) == ["b.weight"]


def test_tickets_are_equal_by_what_they_hold(ticket):
    same = Ticket(dict(ticket.masks), 0.6, epoch=4, step=100, distances=(0.3, 0.05))
    assert ticket == same == copy.deepcopy(ticket)
    assert ticket != Ticket(dict(ticket.masks), 0.6, epoch=5, step=100, distances=(0.3, 0.05))
    assert ticket != Ticket({"a.weight": ticket.masks["a.weight"]}, 0.6)


def test_save_and_load(ticket, tmp_path):
    ticket.save(tmp_path / "best.ticket")
    assert Ticket.load(tmp_path / "best.ticket") == ticket
    assert Ticket.load(str(tmp_path / "best.ticket")) == ticket


def test_files_that_are_no_tickets_are_refused(tmp_path):
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
