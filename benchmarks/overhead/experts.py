"""Measures pruned experts, in one parameter and in separate layers, against dense ones.

    python -m benchmarks.overhead.experts

Forward and backward passes in one thread. The first table has experts of 256 -> 512 -> 256, 32
tokens each: all in two parameters of three dimensions, which a loop reads expert by expert, and as
separate ``nn.Linear``. The second has the block of Mixtral in ``transformers``, 256 wide, with two
experts of 512 a token and 16 tokens an expert, so that 32 go to each on average, with each of its
implementations. The dense time is that of torch's own products, or with those of oneDNN; shares are
of the faster one. ``--implementations batched_mm`` takes seconds a pass.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse import sparsify
from lightning_axosparse.support.dense_products import without_mkl

WIDTH, INNER, TOKENS = 256, 512, 32


class Fused(nn.Module):
    """Experts in two parameters."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, INNER, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, INNER) / INNER**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = []
        for expert, tokens in enumerate(inputs):
            inner = F.linear(tokens, self.up[expert]).relu()
            outputs.append(F.linear(inner, self.down[expert]))
        return torch.stack(outputs)


class Separate(nn.Module):
    """The same experts as layers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(experts))

    def forward(self, inputs: Tensor) -> Tensor:
        experts = zip(inputs, self.up, self.down, strict=True)
        return torch.stack([down(up(tokens).relu()) for tokens, up, down in experts])


def mixtral(experts: int, implementation: str) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_local_experts=experts,
        num_experts_per_tok=2,
        experts_implementation=implementation,
    )
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.05)
    return block


def pruned(module: nn.Module, ratio: float) -> nn.Module:
    module = copy.deepcopy(module)
    shapes = {name: p.shape for name, p in module.named_parameters() if "gate." not in name}
    sparsify(module, {name: torch.rand(shape) > ratio for name, shape in shapes.items()})
    return module


def passes(
    module: nn.Module, inputs: Tensor, mode: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], None]:
    def run() -> None:
        module.zero_grad()
        with mode():
            module(inputs).sum().backward()

    return run


def row(name: str, runners: Mapping[str, Callable[[], None]], trials: int) -> str:
    seconds = median_seconds(runners, trials)
    fastest = min(seconds["torch"], seconds["oneDNN"])
    shares = [f"{seconds[key] / fastest:.2f}" for key in list(runners)[2:]]
    if "separate" in runners:
        shares.append(f"{seconds['fused'] / seconds['separate']:.2f}")
    dense = [f"{seconds[key] * 1e3:.1f} ms" for key in ("torch", "oneDNN")]
    return f"| {name} | {' | '.join([*dense, *shares])} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32])
    arguments.add_argument("--ratio", type=float, default=0.9)
    arguments.add_argument("--trials", type=int, default=25)
    arguments.add_argument("--implementations", nargs="+", default=["eager", "grouped_mm"])
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| experts | torch | oneDNN | separate | fused | fused / separate |")
    print("| --: | --: | --: | --: | --: | --: |")
    for experts in options.experts:
        inputs = torch.randn(experts, TOKENS, WIDTH, requires_grad=True)
        dense = Fused(experts)
        runners = {
            "torch": passes(dense, inputs),
            "oneDNN": passes(dense, inputs, without_mkl),
            "separate": passes(pruned(Separate(experts), options.ratio), inputs),
            "fused": passes(pruned(dense, options.ratio), inputs),
        }
        print(row(str(experts), runners, options.trials), flush=True)
    print("\n| experts | implementation | torch | oneDNN | pruned |")
    print("| --: | --- | --: | --: | --: |")
    for experts in options.experts:
        inputs = torch.randn(1, experts * TOKENS // 2, WIDTH, requires_grad=True)
        for implementation in options.implementations:
            block = mixtral(experts, implementation)
            runners = {
                "torch": passes(block, inputs),
                "oneDNN": passes(block, inputs, without_mkl),
                "pruned": passes(pruned(block, options.ratio), inputs),
            }
            print(row(f"{experts} | {implementation}", runners, options.trials), flush=True)


if __name__ == "__main__":
    main()
