"""Lets torchvision of PyPI be imported beside torch for CPU.

Python imports this module when it starts, if its folder is in the path. The wheel has torchvision's
operators compiled for CUDA alone, and its import fails as two of them are not declared. No network
that is tested here calls them, so that they need no kernel.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
