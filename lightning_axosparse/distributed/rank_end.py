"""Finds out how the process of a rank has ended that did not report it."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def exit_code(pid: int) -> int | None:
    """The exit code of an ended process, or the negative number of the signal that killed it.

    Args:
        pid: of any process.

    Returns:
        None if its parent has already read the code.
    """
    try:
        state, *_, status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None


def describe_end(code: int | None) -> str:
    """Describe how a rank has ended, by its :func:`exit_code`, after the rank in a sentence."""
    if code is None:
        return "ended without a report: killed, or by `os._exit`."
    if code >= 0:
        return (
            f"ended with exit code {code} before its work was done, as by `os._exit`; its output "
            "above may say why."
        )
    memory = " The kernel does that when memory runs out." if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}.{memory}"
