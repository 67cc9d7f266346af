"""Installs what a test needs from Debian, on machines on which tests may do so."""

from __future__ import annotations

import os
import shutil
import subprocess


def install(*packages: str) -> None:
    """Install Debian packages; only where ``CI`` is set, as root, on Debian."""
    if not os.environ.get("CI") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ("-qq", "-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::Retries=2")
    for command in (("update",), ("install", "-y", "--no-install-recommends", *packages)):
        subprocess.run(["apt-get", *options, *command], env=environment, timeout=300, check=False)
