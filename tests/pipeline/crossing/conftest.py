from __future__ import annotations

import copy
from typing import Any

import pytest

from lightning_axosparse.pipeline.crossing.message import Activation, LoopbackLink


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Activation]:
    """The activations that have been sent between stages."""
    messages: list[Activation] = []
    send = LoopbackLink.send_activation

    def record(link: LoopbackLink, activation: Activation) -> Any:
        messages.append(copy.copy(activation))
        return send(link, activation)

    monkeypatch.setattr(LoopbackLink, "send_activation", record)
    return messages
