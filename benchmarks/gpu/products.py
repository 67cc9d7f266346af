"""Times products of few tokens with a pruned weight on one GPU.

    python -m benchmarks.gpu.products              # on a CUDA device
    python -m benchmarks.gpu.products --tiny       # on CPU: does it all work?

Three ways: torch's product with a dense weight, which is that of ``compute="samo"``, too; the
package's without a copy (the dense weight made from the bitmap, then the product); and
torch's with CSR (cuSPARSE). Before any timing, every way is compared with the product in float32,
to the bit: all operands are small integers. Then prints a Markdown table of the time of one
product, in a run through a stack of weights that no cache holds. Each run but those of cuSPARSE is
a CUDA graph, so that the GPU's time is measured and not the host's.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.timing import median_seconds, recorded
from lightning_axosparse.sparse.ops import panels
from lightning_axosparse.sparse.store.formats import BitmapLayout


@dataclass
class Weight:
    """A pruned weight, as each way reads it."""

    dense: Tensor
    values: Tensor
    layout: BitmapLayout
    csr: Tensor

    @classmethod
    def random(cls, size: int, ratio: float, dtype: torch.dtype, device: torch.device) -> Weight:
        """Return a square weight with ones of either sign in its kept entries."""
        mask = torch.rand(size, size, device=device) >= ratio
        dense = (mask * (2 * torch.randint_like(mask, 2, dtype=torch.int8) - 1)).to(dtype)
        layout = BitmapLayout.from_mask(mask)
        csr = dense.to_sparse_csr()
        index = csr.crow_indices().int(), csr.col_indices().int()
        csr = torch.sparse_csr_tensor(*index, csr.values(), csr.shape)
        return cls(dense, layout.compress(dense), layout, csr)


Way = Callable[[Tensor, Weight], Tensor]


def dense(inputs: Tensor, weight: Weight) -> Tensor:
    return F.linear(inputs, weight.dense)


def package(inputs: Tensor, weight: Weight) -> Tensor:
    return panels.spmm_t(inputs, weight.values, weight.layout)


def csr(inputs: Tensor, weight: Weight) -> Tensor:
    return (weight.csr @ inputs.t()).t()


WAYS: dict[str, Way] = {"dense": dense, "package": package, "csr": csr}


def check(inputs: Tensor, weight: Weight) -> None:
    """Check that every way computes what the product in float32 does."""
    expected = F.linear(inputs.float(), weight.dense.float()).to(inputs.dtype)
    for name, way in WAYS.items():
        assert torch.equal(way(inputs, weight), expected), name


def through(stack: Sequence[Weight], way: Way, inputs: Tensor) -> None:
    """Multiply the inputs by each weight of the stack."""
    for weight in stack:
        way(inputs, weight)


def row(stack: Sequence[Weight], inputs: Tensor, trials: int) -> str:
    """Check and time all ways; return the cells from the number of tokens on."""
    check(inputs, stack[0])
    runners = {name: partial(through, stack, way, inputs) for name, way in WAYS.items()}
    by_host = {"csr": runners.pop("csr")}  # cuSPARSE is not asked whether it can be recorded
    seconds = median_seconds({**recorded(runners, inputs.device), **by_host}, trials, inputs.device)
    times = {name: seconds[name] / len(stack) * 1e6 for name in WAYS}
    others = [f"{times[name]:.0f} us | {times[name] / times['dense']:.2f}" for name in times][1:]
    return " | ".join([str(len(inputs)), f"{times['dense']:.0f} us", *others])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tiny", action="store_true", help="small weights on CPU")
    arguments.add_argument("--size", type=int, default=8192, help="rows and columns of a weight")
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("No CUDA device here: run with --tiny to try the script on CPU.")
    warnings.filterwarnings("ignore", "Sparse")
    torch.manual_seed(0)
    device = torch.device("cpu" if options.tiny else "cuda")
    size, number = (64, 1) if options.tiny else (options.size, 8)
    # torch has no 16-bit product with CSR on CPU.
    dtype = torch.float32 if options.tiny else torch.bfloat16
    print("| pruned | tokens | dense | package | / dense | CSR | / dense |")
    print("| --: | --: | --: | --: | --: | --: | --: |")
    for ratio in (0.8, 0.9, 0.95):
        stack = [Weight.random(size, ratio, dtype, device) for _ in range(number)]
        for tokens in (1, 4, 16, 64):
            inputs = torch.randint(-1, 2, (tokens, size), device=device).to(dtype)
            print(f"| {ratio:.0%} | {row(stack, inputs, options.trials)} |", flush=True)


if __name__ == "__main__":
    main()
