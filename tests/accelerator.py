"""What tests of whole runs train on: the CPU or, told so, one GPU that all ranks of a test share.

AXOSPARSE_TEST_ACCELERATOR=cuda python -m pytest tests/parity tests/corpus
"""

from __future__ import annotations

import os
from typing import Any

import torch

ACCELERATOR = os.environ.get("AXOSPARSE_TEST_ACCELERATOR", "cpu")


def trainer_devices(strategy: Any, devices: int) -> dict[str, Any]:
    """The Trainer's arguments for a run of so many ranks; the strategy learns their devices."""
    if ACCELERATOR == "cpu" or devices == 1:
        return {"accelerator": ACCELERATOR, "devices": devices}
    strategy.parallel_devices = [torch.device(ACCELERATOR, 0)] * devices
    # NCCL connects ranks that share a GPU only if it takes them for ranks of several hosts.
    os.environ["NCCL_HOSTID"] = f"rank {os.environ.get('PMI_RANK')}"
    return {"accelerator": ACCELERATOR}
