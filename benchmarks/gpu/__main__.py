"""Runs all GPU benchmarks: parity, two ranks on one GPU, then kernels, products, whole steps."""

from __future__ import annotations

import subprocess
import sys

failed = [
    name
    for name in ("training", "stages", "kernels", "products", "step")
    if subprocess.run([sys.executable, "-m", f"benchmarks.gpu.{name}", *sys.argv[1:]]).returncode
]
sys.exit(f"Failed: {', '.join(failed)}" if failed else 0)
