"""What layers leave beside their output reaches the loss from every stage, as on one process.

Router logits, hidden states and attentions that `transformers` collects by hooks, hooks of a user,
and attributes that layers set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline.crossing.message import Crossing, LoopbackLink, encode
from lightning_axosparse.pipeline.engine import Pipeline
from tests.parity.cases import Record, difference, recorded, trainer
from tests.parity.networks import in_float64
from tests.ranks import run_ranks

VOCABULARY, WIDTH, LENGTH, LAYERS = 23, 16, 10, 4
BATCH, STEPS = 6, 5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "use_cache": False,
}
EXPERTS = {"experts_implementation": "eager"}


class Case(L.LightningModule):
    """A network whose loss has a part that is no function of its last layer's output."""

    def loss(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def causal_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:])


class Routed(Case):
    """A mixture of experts with the auxiliary loss that balances them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = in_float64(network)

    def loss(self, ids: Tensor) -> Tensor:
        output = self.network(input_ids=ids, output_router_logits=True)
        assert len(output.router_logits) == LAYERS
        return causal_loss(output.logits, ids) + output.aux_loss


class Inspected(Case):
    """Hidden states and attentions of all layers in the loss."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(**SIZES, attn_implementation="eager")
        self.network = in_float64(LlamaForCausalLM(config))

    def loss(self, ids: Tensor) -> Tensor:
        output = self.network(input_ids=ids, output_hidden_states=True, output_attentions=True)
        assert len(output.hidden_states) == LAYERS + 1
        assert len(output.attentions) == LAYERS
        hidden = sum(state.pow(2).mean() * (i + 1) for i, state in enumerate(output.hidden_states))
        sure = sum(attention.pow(3).mean() for attention in output.attentions)
        return causal_loss(output.logits, ids) + 0.1 * hidden - sure


class Block(nn.Module):
    """Two linear layers; ``emit`` is called with the block and what is between them."""

    def __init__(self, emit: Callable[[Block, Tensor], None] | None = None) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.down, self.emit = nn.Linear(WIDTH, WIDTH), emit
        self.penalty: Any = 0.0
        self.penalties: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x))
        if self.emit is not None:
            self.emit(self, inner)
        return x + self.down(inner)


class Blocks(Case):
    """Blocks behind an embedding."""

    def __init__(self, emit: Callable[[Block, Tensor], None] | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block(emit) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).mT, ids)


def set_penalty(block: Block, inner: Tensor) -> None:
    block.penalty = inner.pow(2).mean()


def append_penalty(block: Block, inner: Tensor) -> None:
    block.penalties.append(inner.pow(2).mean())


class Attributes(Blocks):
    """Each block sets an attribute."""

    def __init__(self) -> None:
        super().__init__(set_penalty)

    def loss(self, ids: Tensor) -> Tensor:
        return self(ids) + sum(layer.penalty * (i + 1) for i, layer in enumerate(self.layers))


class SharedList(Blocks):
    """Each block appends to the same list, which is emptied when it has been read."""

    def __init__(self) -> None:
        super().__init__(append_penalty)
        self.penalties: list[Tensor] = []
        for layer in self.layers:
            layer.penalties = self.penalties

    def loss(self, ids: Tensor) -> Tensor:
        loss = self(ids) + sum(p * (i + 1) for i, p in enumerate(self.penalties))
        assert len(self.penalties) == LAYERS
        self.penalties.clear()
        return loss


class Hooks(Blocks):
    """Hooks keep outputs of modules inside of layers and of layers, and what they compute of them.

    Some hooks change what they are given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for layer in self.layers:
            layer.act.register_forward_hook(lambda module, args, output: output * 1.5)
            layer.act.register_forward_hook(lambda module, args, out: self.kept.append(out))
            layer.up.register_forward_pre_hook(lambda module, args: self.kept.append(args[0]))
            layer.down.register_forward_hook(self.penalize)
            layer.register_forward_hook(lambda module, args, output: self.kept.append(output))
            layer.register_forward_hook(lambda module, args, output: output + 0.5)
            layer.register_forward_hook(lambda module, args, out: self.kept.append(out.abs()))

    def penalize(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.kept.append(output.detach().sin() + output.cos().mean((1, 2), keepdim=True))
        return output

    def loss(self, ids: Tensor) -> Tensor:
        self.kept.clear()
        loss = self(ids)
        assert len(self.kept) == 5 * LAYERS
        return loss + sum(t.pow(2).mean() * (i + 1) for i, t in enumerate(self.kept)) / 100


class Stored(Blocks):
    """The step stores outputs of layers on the module, and reads some of them in the loss."""

    def loss(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.states: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
            self.states.append(x)
        self.first = self.states[0].exp()
        loss = nn.functional.cross_entropy(self.head(x).mT, ids)
        return loss + self.first.mean() + self.states[1].pow(2).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        # On each rank, whose step has got as far as this.
        assert all(state.isfinite().all() for state in self.states)


class Late(Blocks):
    """After the second step the loss reads the first layer's output."""

    def loss(self, ids: Tensor) -> Tensor:
        x = first = self.layers[0](self.embed(ids))
        for layer in self.layers[1:]:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x).mT, ids)
        return loss + first.square().mean() if self.global_step > 1 else loss


def mixtral() -> Case:
    config = MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4, num_experts_per_tok=2)
    return Routed(MixtralForCausalLM(config))


def qwen() -> Case:
    config = Qwen3MoeConfig(
        **SIZES,
        **EXPERTS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    return Routed(Qwen3MoeForCausalLM(config))


class Logits(Routed):
    """A mean over the router's logits, which micro-batches do not change."""

    def loss(self, ids: Tensor) -> Tensor:
        output = self.network(input_ids=ids, output_router_logits=True)
        logits = sum(logits.pow(2).mean() for logits in output.router_logits)
        return causal_loss(output.logits, ids) + 0.1 * logits


def router_logits() -> Case:
    config = MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4, num_experts_per_tok=2)
    return Logits(MixtralForCausalLM(config))


CASES: dict[str, Callable[[], Case]] = {
    "Mixtral": mixtral,
    "Qwen3-MoE": qwen,
    "router logits": router_logits,
    "Llama": Inspected,
    "attributes": Attributes,
    "shared list": SharedList,
    "hooks": Hooks,
    "stored": Stored,
    "late": Late,
}
# Row: case, strategy.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"microbatches": 3}),
    "Qwen3-MoE": ("Qwen3-MoE", {"microbatches": 3}),
    "Mixtral recomputed": ("Mixtral", {"microbatches": 2, "recompute": 1}),
    "router logits": ("router logits", {"microbatches": 3}),
    "Llama": ("Llama", {"microbatches": 3}),
    "Llama recomputed": ("Llama", {"microbatches": 2, "recompute": "sqrt"}),
    "attributes": ("attributes", {"microbatches": 3}),
    "attributes recomputed": ("attributes", {"microbatches": 3, "recompute": 1}),
    "shared list": ("shared list", {"microbatches": 3}),
    "hooks": ("hooks", {"microbatches": 3}),
    "hooks recomputed": ("hooks", {"microbatches": 3, "recompute": 2}),
    "stored": ("stored", {"microbatches": 3}),
    "late": ("late", {"microbatches": 3}),
}


def train(case: str, strategy: Any, ranks: int = 1) -> Record:
    L.seed_everything(0, verbose=False)
    module = CASES[case]()
    run = trainer(strategy, ranks, precision="64-true", max_epochs=1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (BATCH * STEPS, LENGTH), generator=generator)
    run.fit(module, DataLoader(ids, batch_size=BATCH), DataLoader(ids[:12], batch_size=BATCH))
    return recorded(run, module)


def strategy(row: str, stages: int, **options: Any) -> AxoSparseStrategy:
    case, own = ROWS[row]
    made = CASES[case]
    is_blocks = isinstance(made, type) and issubclass(made, Blocks)
    container = "layers" if is_blocks else "network.model.layers"
    return AxoSparseStrategy(g_inter=stages, pipeline=container, **own, **options)


def train_rows(ranks: int) -> dict[str, Record]:
    return {row: train(case, strategy(row, ranks), ranks) for row, (case, _) in ROWS.items()}


@pytest.fixture(scope="module")
def runs() -> dict[int, list[dict[str, Record]]]:
    """The records of every row on every rank, by number of ranks."""
    return {ranks: run_ranks(ranks, train_rows, ranks) for ranks in (2, 3)}


@pytest.fixture(scope="module")
def expected() -> dict[str, Record]:
    """What one process does in each case."""
    return {case: train(case, "auto") for case in CASES}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("row", ROWS)
def test_what_layers_emit_reaches_the_loss_on_ranks(
    row: str, ranks: int, runs: Any, expected: dict[str, Record]
) -> None:
    case, _ = ROWS[row]
    assert len(expected[case].validated) == 1
    for records in runs[ranks]:
        assert difference(expected[case], records[row]) <= 1e-12


@pytest.mark.parametrize("row", [row for row in ROWS if "recomputed" not in row])
def test_what_layers_emit_reaches_the_loss_in_one_process(
    row: str, expected: dict[str, Record]
) -> None:
    case, _ = ROWS[row]
    record = train(case, strategy(row, 3, transport="loopback"))
    assert difference(expected[case], record) <= 1e-12


class Plain(Case):
    """A network as it comes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, ids: Tensor) -> Tensor:
        return causal_loss(self.network(input_ids=ids).logits, ids)


@pytest.mark.parametrize("network", ["GPT-2", "Llama"])
def test_a_network_of_which_nothing_else_is_read_sends_its_activations_alone(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2 = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=3, n_head=2)
    make: dict[str, Callable[[], Case]] = {
        "GPT-2": lambda: Plain(GPT2LMHeadModel(gpt2)),
        "Llama": lambda: Plain(LlamaForCausalLM(LlamaConfig(**SIZES))),
    }
    monkeypatch.setitem(CASES, network, make[network])
    container = {"GPT-2": "network.transformer.h", "Llama": "network.model.layers"}[network]
    blocks: list[int] = []
    send = LoopbackLink.send_activation

    def count(link: LoopbackLink, tree: Any) -> Any:
        blocks.append(encode(tree, torch.device("cpu"))[1].nbytes)
        return send(link, tree)

    def probe(pipeline: Pipeline, batch: Any) -> Crossing | None:
        try:
            return learn(pipeline, batch)
        finally:
            blocks.clear()

    learn = Pipeline.probe
    monkeypatch.setattr(Pipeline, "probe", probe)
    monkeypatch.setattr(LoopbackLink, "send_activation", count)
    train(
        network,
        AxoSparseStrategy(3, 3, transport="loopback", pipeline=container),
    )
    assert set(blocks) == {2 * LENGTH * WIDTH * 8}, "two samples of float64"
