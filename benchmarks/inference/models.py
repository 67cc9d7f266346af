"""One random GPT, pruned, dense in two precisions, and quantized."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as QuantizedLinear
from torch.ao.quantization import quantize_dynamic

from benchmarks.memory.step import masks_of
from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.sparse.module.parameters import state_bytes

CONTEXT = 128
PRUNED = (0.8, 0.9, 0.95)
VOCABULARY = 10_000


def models(width: int, layers: int) -> dict[str, GPT]:
    """Return one random GPT in all its forms."""
    torch.manual_seed(0)
    heads = max(1, width // 64)
    dense = GPT(width=width, depth=layers, heads=heads, context=CONTEXT, vocabulary=VOCABULARY)
    return {
        "float32": dense,
        "bfloat16": copy.deepcopy(dense).bfloat16(),
        "int8": quantized(dense),
        **{f"{ratio:.0%} pruned": pruned(dense, ratio) for ratio in PRUNED},
    }


def pruned(dense: GPT, ratio: float) -> GPT:
    model = copy.deepcopy(dense)
    sparsify(model, masks_of(model, ratio, floor=1.0))
    return model


def quantized(dense: GPT) -> GPT:
    with warnings.catch_warnings():  # torch announces that it moves to another package
        warnings.simplefilter("ignore")
        model: GPT = quantize_dynamic(dense, {nn.Linear}, dtype=torch.qint8)
    return model


def stored_bytes(model: GPT) -> int:
    """Return the bytes of weights and of their positions."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    packed = [tensor for layer in layers for tensor in (layer.weight(), layer.bias())]
    return state_bytes(model).total + sum(tensor.nbytes for tensor in packed if tensor is not None)
