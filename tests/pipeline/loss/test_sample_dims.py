"""Code of this package is told from that of users, whose examples count as theirs."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from lightning_axosparse.pipeline.loss.sample_dims import is_ours, users_frame


def frame_of(module: str) -> FrameType:
    """A frame of code of a module, called from this one."""
    names = {"__name__": module, "frame": sys._getframe}
    frame: FrameType = eval("(lambda: frame())()", names)
    return frame


@pytest.mark.parametrize(
    ("module", "ours"),
    [
        ("lightning_axosparse.strategy.strategy", True),
        ("lightning_axosparse.examples.gpt", False),
        ("lightning_axosparse_of_a_user", False),
        ("torch.nn.functional", False),
    ],
)
def test_whose_code_has_called(module: str, ours: bool) -> None:
    assert is_ours(frame_of(module)) is ours


def test_the_users_frame_is_found_behind_this_package_and_torch() -> None:
    for module in ("lightning_axosparse.pipeline.engine", "torch.nn.functional"):
        assert users_frame(frame_of(module)).f_code is frame_of.__code__
    assert users_frame(frame_of("a_user")).f_globals["__name__"] == "a_user"
