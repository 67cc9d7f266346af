"""What all tests share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from tests.ranks import warm_python

# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# As many as a rank has: the last bits of torch's sums depend on the number of threads.
torch.set_num_threads(1)

# The files that take longest. A worker runs a file whole, so one that starts last is waited for.
LONGEST = (
    "test_notebooks.py",
    "test_launcher.py",
    "test_waits.py",
    "test_nothing_left_behind.py",
    "test_slurm.py",
    "test_hosts.py",
    "test_regrid.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a Trainer's call starts need not import anything; test_launcher starts cold ones.

    They are forked from the process that :func:`tests.ranks.run_ranks` forks its ranks from.
    """
    from lightning_axosparse.strategy.launcher import launcher

    monkeypatch.setattr(launcher, "WORKER", (*warm_python(), *launcher.WORKER[1:]))
