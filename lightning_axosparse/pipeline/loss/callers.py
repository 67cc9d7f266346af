"""Tells whose code has called a function, by the frames of the call."""

from __future__ import annotations

import re
from types import FrameType

_OURS = re.compile(rf"{__name__.partition('.')[0]}\.(?!examples\.)")
"""The modules of this package; those of the examples are as a user's."""


def is_ours(caller: FrameType | None) -> bool:
    """Whether code of this package has called a function, besides other modes that hand it on."""
    while caller is not None and caller.f_code.co_name == "__torch_function__":
        caller = caller.f_back
    if caller is None:
        return False
    return _OURS.match(str(caller.f_globals.get("__name__"))) is not None


def users_frame(caller: FrameType) -> FrameType:
    """The innermost frame of a call that is neither of this package nor of torch."""
    while caller.f_back is not None:
        package = str(caller.f_globals.get("__name__")).partition(".")[0]
        if package != "torch" and not is_ours(caller):
            break
        caller = caller.f_back
    return caller
