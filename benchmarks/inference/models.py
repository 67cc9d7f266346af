"""One random GPT, dense and pruned, in two precisions and in int8."""

from __future__ import annotations

import copy
import warnings
from typing import TypeVar

import torch
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as QuantizedLinear
from torch.ao.quantization import quantize_dynamic

from benchmarks.memory.step import masks_of
from lightning_axosparse import Ticket, load_sparse, sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.sparse.module.int8_linear import Int8Linear
from lightning_axosparse.sparse.module.parameters import layouts, state_bytes

CONTEXT = 128
PRUNED = (0.8, 0.9, 0.95)
VOCABULARY = 10_000
Module = TypeVar("Module", bound=nn.Module)


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
        **{f"{ratio:.0%} pruned, int8": pruned_in_int8(dense, ratio) for ratio in PRUNED},
    }


def pruned(dense: GPT, ratio: float) -> GPT:
    model = copy.deepcopy(dense)
    sparsify(model, masks_of(model, ratio, floor=1.0))
    return model


def pruned_in_int8(dense: GPT, ratio: float) -> GPT:
    model = copy.deepcopy(dense)
    ticket = Ticket(masks_of(model, ratio, floor=1.0), ratio)
    load_sparse(model, dense.state_dict(), ticket, dtype=torch.int8)
    return model


def quantized(dense: Module) -> Module:
    with warnings.catch_warnings():  # torch announces that it moves to another package
        warnings.simplefilter("ignore")
        model: Module = quantize_dynamic(dense, {nn.Linear}, dtype=torch.qint8)
    return model


def stored_bytes(model: GPT) -> int:
    """Return the bytes of weights and of their positions."""
    total = state_bytes(model).total
    positions = {id(layout) for layout in layouts(model).values()}
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            packed = layer.weight(), layer.bias()
            total += sum(tensor.nbytes for tensor in packed if tensor is not None)
        if isinstance(layer, Int8Linear):
            stored = layer.stored
            total += sum(part.nbytes for part in (stored.values, stored.scales, stored.sums))
            total += 0 if id(stored.layout) in positions else stored.layout.nbytes
    return total
