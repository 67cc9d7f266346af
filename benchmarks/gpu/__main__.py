"""Runs all GPU benchmarks: parity first, then the kernels, products, then whole steps."""

from __future__ import annotations

import os
import subprocess
import sys

# On CPU, Triton's kernels run in its interpreter.
environment = os.environ | ({"TRITON_INTERPRET": "1"} if "--tiny" in sys.argv else {})
failed = [
    name
    for name in ("training", "kernels", "products", "step")
    if subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{name}", *sys.argv[1:]], env=environment
    ).returncode
]
sys.exit(f"Failed: {', '.join(failed)}" if failed else 0)
