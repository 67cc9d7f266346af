from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
from lightning_axosparse.callbacks.requirements import refuse_model
from lightning_axosparse.pruning import Ticket
from lightning_axosparse.sparse import sparsify


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pruning_ratio": 1.0}, "pruning_ratio=1.0"),
        ({"pruning_ratio": 0.0}, "pruning_ratio=0.0"),
        ({"scope": "model"}, "scope='model'"),
        ({"distance": "jaccard"}, "distance='jaccard'"),
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"window": 1}, "window=1"),
        ({"draw_by_epoch": 0}, "draw_by_epoch=0"),
        ({"pruning_ratio": "0.8"}, "pruning_ratio='0.8'"),
        ({"threshold": None}, "threshold=None"),
        ({"window": 2.5}, "window=2.5"),
        ({"draw_by_epoch": "2"}, "draw_by_epoch='2'"),
        ({"exclude": "head.*"}, r"\['head\.\*'\]"),
        ({"ticket": {}}, "ticket={}"),
        ({"policy": "dense"}, "policy='dense'.*samo"),
    ],
)
def test_arguments_out_of_range_are_refused(settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        EarlyBirdTicket(**settings)


def test_a_ticket_fits_a_model_that_is_stored_sparse_already():
    model = nn.Sequential(nn.Linear(6, 4))
    masks = {"0.weight": torch.rand(4, 6) < 0.5}
    sparsify(model, masks)
    refuse_model(model, [], Ticket(masks, 0.5))
    with pytest.raises(MisconfigurationException, match=r"\(4, 5\).*\(4, 6\)"):
        refuse_model(model, [], Ticket({"0.weight": torch.rand(4, 5) < 0.5}, 0.5))
