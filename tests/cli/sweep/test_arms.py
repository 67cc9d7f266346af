from __future__ import annotations

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_axosparse import Ticket
from lightning_axosparse.cli.sweep.arms import initial_magnitudes, random_ticket
from tests.cli.sweep.jobs import write_job


def test_what_is_taken_from_the_job_of_a_ticket(tmp_path):
    write_job(tmp_path / "a", "ticket", 0.8, ticket=True)
    drawn = Ticket.load(tmp_path / "a" / "ticket.pt")
    random = random_ticket(str(tmp_path / "a"), 3)
    assert random.layer_sparsity() == drawn.layer_sparsity()
    assert random == drawn.random(3)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (None, "no job has run there. Run arm=ticket with the same"),
        ({"error": "Sorry\n\n..."}, "has failed: Sorry. Run it again with: axosparse-train arm="),
        ({"finished": False}, "has not finished. Run it again with: axosparse-train arm="),
        ({"draw_step": None}, r"that job drew none. Give it pruning\.draw_by"),
    ],
)
def test_what_is_missing_is_said(job, message, tmp_path):
    if job is not None:
        write_job(tmp_path / "a", "ticket", 0.8, **job)
    with pytest.raises(ValueError, match=message):
        random_ticket(str(tmp_path / "a"), 0)


def test_the_largest_initial_weights_are_those_of_the_run():
    config = OmegaConf.create(
        {
            "_target_": "lightning_axosparse.examples.gpt.GPT",
            **{"width": 8, "depth": 1, "heads": 2, "context": 8},
        }
    )
    L.seed_everything(5)
    before = torch.get_rng_state()
    ticket = initial_magnitudes(config, 5, 0.75, 0.0, None)
    assert torch.equal(torch.get_rng_state(), before)
    model = instantiate(config)
    weights = {name: p.detach().abs() for name, p in model.named_parameters() if p.dim() > 1}
    least = min(weights[name][mask].min() for name, mask in ticket.masks.items())
    most = max(weights[name][~mask].max() for name, mask in ticket.masks.items())
    assert most <= least
    assert ticket.sparsity == pytest.approx(0.75, abs=1e-3)
