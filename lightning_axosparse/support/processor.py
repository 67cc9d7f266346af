"""Tells what the system says about this machine's processor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def cpu_info() -> Mapping[str, str]:
    """Return Linux's description of the first core, such as "vendor_id" and "flags".

    What is not described, as anything on another system, is an empty text.
    """
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    pairs = (line.partition(":") for line in first.splitlines())
    return defaultdict(str, {name.strip(): value.strip() for name, _, value in pairs})
