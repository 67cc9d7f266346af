"""Triton reads this when it is imported, by whomever: its kernels run in its interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
