"""Measures LSTM and GRU layers with a dense weight at every use, and step by step on kept values.

    python -m benchmarks.overhead.recurrent

Forward and backward, float32, one thread, random masks. "dense weight" is what the package does:
torch's layer on weights that are made dense at every use. "kept values" multiplies the inputs of
all steps at once, and the state of each step in a loop in Python, with the pruned layers of
``nn.Linear``. Prints a Markdown table of shares of the dense layer's time.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.overhead.interleaved import median_seconds
from lightning_axosparse import sparsify

LAYERS: dict[str, type[nn.LSTM | nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}


class StepByStep(nn.Module):
    """A layer of LSTM or GRU whose two products are linear layers, of the same parameters."""

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        gates = 4 if isinstance(layer, nn.LSTM) else 3
        self.inputs = nn.Linear(layer.input_size, gates * layer.hidden_size)
        self.state = nn.Linear(layer.hidden_size, gates * layer.hidden_size)
        self.step = lstm_step if isinstance(layer, nn.LSTM) else gru_step
        with torch.no_grad():
            for made, suffix in ((self.inputs, "ih_l0"), (self.state, "hh_l0")):
                made.weight.copy_(getattr(layer, f"weight_{suffix}"))
                made.bias.copy_(getattr(layer, f"bias_{suffix}"))

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the outputs of all steps: (steps, sequences, width) -> the same shape."""
        from_inputs = self.inputs(inputs)
        hidden = cell = inputs.new_zeros(inputs.shape[1], self.state.in_features)
        outputs = []
        for step in from_inputs:
            hidden, cell = self.step(step, self.state(hidden), hidden, cell)
            outputs.append(hidden)
        return torch.stack(outputs)


def lstm_step(
    from_inputs: Tensor, from_state: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    enter, forget, new, leave = (from_inputs + from_state).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def gru_step(
    from_inputs: Tensor, from_state: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    width = hidden.shape[-1]
    reset, update = (from_inputs + from_state)[:, : 2 * width].sigmoid().chunk(2, -1)
    new = (from_inputs[:, 2 * width :] + reset * from_state[:, 2 * width :]).tanh()
    return new + update * (hidden - new), cell


def pruned(layer: nn.Module, masks: list[Tensor]) -> nn.Module:
    layer = copy.deepcopy(layer)
    names = [name for name, parameter in layer.named_parameters() if parameter.dim() > 1]
    sparsify(layer, dict(zip(names, masks, strict=True)))
    return layer


def passes(module: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def run() -> None:
        module.zero_grad()
        inputs.grad = None
        outputs = module(inputs)
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()

    return run


def row(kind: str, width: int, sequences: int, steps: int, ratio: float, trials: int) -> str:
    torch.manual_seed(0)
    layer = LAYERS[kind](width, width)
    masks = [torch.rand(p.shape) > ratio for p in layer.parameters() if p.dim() > 1]
    inputs = torch.randn(steps, sequences, width, requires_grad=True)
    today, loop = pruned(layer, masks), pruned(StepByStep(layer), masks)
    torch.testing.assert_close(loop(inputs), today(inputs)[0], rtol=1e-4, atol=1e-5)
    modules = {"dense": layer, "dense weight": today, "kept values": loop}
    runners = {name: passes(module, inputs) for name, module in modules.items()}
    seconds = median_seconds(runners, trials)
    ways = ("dense weight", "kept values")
    shares = " | ".join(f"{seconds[name] / seconds['dense']:.2f}" for name in ways)
    size = f"{width} | {sequences} | {steps} | {ratio:.0%}"
    return f"| {kind} | {size} | {seconds['dense'] * 1e3:.0f} ms | {shares} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kinds", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    arguments.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024])
    arguments.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    arguments.add_argument("--steps", type=int, default=32)
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    arguments.add_argument("--trials", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print("| layer | units | sequences | steps | pruned | dense | dense weight | kept values |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for kind in options.kinds:
        for width in options.widths:
            for sequences in options.sequences:
                for ratio in options.ratios:
                    size = width, sequences, options.steps, ratio
                    print(row(kind, *size, options.trials), flush=True)


if __name__ == "__main__":
    main()
