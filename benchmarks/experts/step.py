"""Measures steps whose layers several ranks share, beside DeepSpeed's and Lightning's own.

    python -m benchmarks.experts.step

Two ranks with a thread each train with AdamW in float32. In the first table each layer has experts,
two for a token: all of them on each rank, spread over the ranks (``expert_parallel=2``), and spread
by DeepSpeed's ``MoE`` layer, where DeepSpeed is installed. The second has a Mixtral of
transformers, whose experts DeepSpeed's AutoEP spreads. In the third, MLPs are split
(``tensor_parallel=2``), by the plan that a module has for Lightning's ``ModelParallelStrategy``.
Each run is a job of its own; the runs alternate. A step is the time from the end of a batch to the
end of the next, on rank 0; the state is what that rank has of weights, gradients and AdamW's
moments. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy, ExpertParallel

WARM_UP, RANKS = 3, 2
DEEPSPEED = "experts spread, DeepSpeed"
AUTOEP = "Mixtral, experts spread, DeepSpeed's AutoEP"
LIGHTNING = "layers split, Lightning's ModelParallelStrategy"
HAS_DEEPSPEED = find_spec("deepspeed") is not None
EXPERTS: dict[str, dict[str, Any]] = {
    "all experts on each rank, ours": {},
    "experts spread, ours": {"expert_parallel": ExpertParallel(RANKS, "layers.*.experts")},
    **({DEEPSPEED: {}} if HAS_DEEPSPEED else {}),
}
MIXTRAL: dict[str, dict[str, Any]] = {
    "Mixtral, all experts on each rank, ours": {},
    "Mixtral, experts spread, ours": {
        "expert_parallel": ExpertParallel(RANKS, "network.model.layers.*.mlp.experts")
    },
    **({AUTOEP: {}} if HAS_DEEPSPEED else {}),
}
SPLIT: dict[str, dict[str, Any]] = {LIGHTNING: {}, "layers split, ours": {"tensor_parallel": RANKS}}
TABLES = EXPERTS, MIXTRAL, SPLIT
"""The arguments of this package's strategy, by run; the first of a table is its baseline."""


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(tokens)))


class Experts(nn.Module):
    """The experts of a layer, called as those of ``transformers``."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == number)
            computed = self.experts[number](hidden_states[token])
            result = result.index_add(0, token, computed * top_k_weights[token, place, None])
        return result


class Layer(nn.Module):
    """A residual layer whose tokens choose two experts."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, inner, experts)

    def forward(self, tokens: Tensor) -> Tensor:
        normal = self.norm(tokens)
        weights, chosen = self.gate(normal).softmax(-1).topk(2)
        return tokens + self.experts(normal, chosen, weights / weights.sum(-1, keepdim=True))


class Training(L.LightningModule):
    """Layers that learn to return zeros."""

    layers: nn.Sequential

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class WithExperts(Training):
    def __init__(self, width: int, inner: int, experts: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width, inner, experts) for _ in range(depth)))


class Mixtral(Training):
    """The network of transformers, which learns to predict a byte by those before it."""

    def __init__(self, width: int, inner: int, experts: int, depth: int) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        config = MixtralConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=depth,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_local_experts=experts,
            num_experts_per_tok=2,
            use_cache=False,
            experts_implementation="grouped_mm",
        )
        self.network = MixtralForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return byte_loss(self.network, batch)


def byte_loss(network: nn.Module, ids: Tensor) -> Tensor:
    """The cross entropy of each byte but the first."""
    return F.cross_entropy(network(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())


class Split(Training):
    """As for ``ModelParallelStrategy``: the module splits its layers itself."""

    def __init__(self, width: int, inner: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Expert(width, inner) for _ in range(depth)))

    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        for layer in self.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)


def state_bytes(module: nn.Module, optimizer: Any) -> int:
    """The bytes of the parameters of a rank, their gradients and their optimizer state."""
    tensors: list[Any] = []
    for parameter in module.parameters():
        state = optimizer.state.get(parameter, {}).values()
        tensors += [parameter, parameter.grad, *state]
    own = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


class Measured(L.Callback):
    """Notes when steps end, and writes the median step and the state to a file."""

    def __init__(self, path: str) -> None:
        self._path, self._ends, self._state = path, list[float](), 0

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._state = max(self._state, state_bytes(pl_module, optimizer))

    def on_train_batch_end(self, *_: Any) -> None:
        self._ends.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            write(self._path, self._ends, self._state)


def write(path: str, ends: list[float], state: int) -> None:
    steps = [end - start for start, end in pairwise(ends[WARM_UP:])]
    Path(path).write_text(json.dumps([statistics.median(steps), state]))


def fit(name: str, arguments: dict[str, Any], options: argparse.Namespace) -> None:
    """Train some steps with a Trainer, which starts the ranks."""
    width, inner, depth = options.width, options.inner, options.depth
    if name in SPLIT:
        module: Training = Split(width, inner, depth)
    elif name in MIXTRAL:
        module = Mixtral(width, inner, options.experts, depth)
    else:
        module = WithExperts(width, inner, options.experts, depth)
    strategy: Any
    if name == LIGHTNING:
        strategy = ModelParallelStrategy(1, RANKS, process_group_backend="gloo")
    else:
        strategy = AxoSparseStrategy(microbatches=1, **arguments)
    steps = options.steps + WARM_UP
    data = list(torch.randn(RANKS * steps, options.tokens, width))
    if name in MIXTRAL:
        data = list(torch.randint(256, (RANKS * steps, options.tokens + 1)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=steps,
        callbacks=[Measured(options.path)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=1))  # type: ignore[arg-type]


def fit_deepspeed(name: str, options: argparse.Namespace) -> None:
    """Train as many steps on one of the ranks with DeepSpeed's engine."""
    rank = int(os.environ["PMI_RANK"])
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "DS_ACCELERATOR": "cpu"}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": options.port}
    os.environ.update({name: str(value) for name, value in here.items()})
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    shape = options.width, options.inner, options.experts, options.depth
    module, groups = _with_moe(*shape) if name == DEEPSPEED else _with_autoep(*shape)
    spread = {"enabled": True, "autoep_size": RANKS, "preset_model": "mixtral"}
    optimizer = torch.optim.AdamW(groups, 1e-4)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 2**31,
            **({"expert_parallel": spread} if name == AUTOEP else {}),
        },
    )
    ends, state = [], 0
    for _ in range(options.steps + WARM_UP):
        if name == AUTOEP:
            loss = byte_loss(engine, torch.randint(256, (1, options.tokens + 1)))
        else:
            loss = engine(torch.randn(options.tokens, options.width)).square().mean()
        engine.backward(loss)
        state = max(state, state_bytes(module, optimizer))
        engine.step()
        ends.append(time.perf_counter())
    if rank == 0:
        write(options.path, ends, state)


def _with_moe(width: int, inner: int, experts: int, depth: int) -> tuple[nn.Module, Any]:
    """Layers with DeepSpeed's experts, and their parameters in groups."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    module = WithExperts(width, inner, 1, depth)
    for layer in module.layers:
        layer.gate = nn.Identity()
        layer.experts = MoE(
            width,
            Expert(width, inner),
            experts,
            ep_size=RANKS,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )
        layer.forward = _through_moe(layer)
    group = {"params": list(module.parameters()), "name": "all"}
    return module, split_params_into_different_moe_groups_for_optimizer(group)


def _through_moe(layer: Any) -> Any:
    return lambda tokens: tokens + layer.experts(layer.norm(tokens))[0]


def _with_autoep(width: int, inner: int, experts: int, depth: int) -> tuple[nn.Module, Any]:
    """The network of transformers, in which the engine replaces the experts."""
    module = Mixtral(width, inner, experts, depth).network
    return module, module.parameters()


def measure(name: str, given: list[str]) -> tuple[float, int]:
    """Return the median time of a step of one run, and the bytes of its state."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "measured")
        command = [sys.executable, "-m", __spec__.name, "--run", name, "--path", path, *given]
        if name in (DEEPSPEED, AUTOEP):
            command = ["mpiexec", "-n", str(RANKS), *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        seconds, state = json.loads(Path(path).read_text())
        return seconds, state


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--inner", type=int, default=2048, help="of an expert or an MLP")
    arguments.add_argument("--experts", type=int, default=8)
    arguments.add_argument("--depth", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=512, help="of each rank's batch")
    arguments.add_argument("--steps", type=int, default=9)
    arguments.add_argument("--trials", type=int, default=3)
    arguments.add_argument("--port", type=int, default=29571, help="for DeepSpeed's ranks")
    every = [name for table in TABLES for name in table]
    arguments.add_argument("--run", choices=every, help=argparse.SUPPRESS)
    arguments.add_argument("--path", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    sizes = ("width", "inner", "experts", "depth", "tokens", "steps", "port")
    given = [word for name in sizes for word in (f"--{name}", str(getattr(options, name)))]
    if options.run:
        torch.set_num_threads(1)
        L.seed_everything(0, verbose=False)
        if options.run in (DEEPSPEED, AUTOEP):
            fit_deepspeed(options.run, options)
        else:
            fit(options.run, {**EXPERTS, **MIXTRAL, **SPLIT}[options.run], options)
        return
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in every}
    for _ in range(options.trials):
        for name, measured in found.items():
            measured.append(measure(name, given))
    for table in TABLES:
        medians = {name: statistics.median(s for s, _ in found[name]) for name in table}
        base = next(iter(medians.values()))
        print("\n| run | step | ratio | state of rank 0 |\n| --- | --: | --: | --: |")
        for name, median in medians.items():
            state = found[name][0][1] / 1e6
            print(f"| {name} | {median * 1e3:.0f} ms | {median / base:.2f} | {state:.0f} MB |")


if __name__ == "__main__":
    main()
