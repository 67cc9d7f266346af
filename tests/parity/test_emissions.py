"""What layers leave beside their output reaches the loss from every stage, as on one process.

Hidden states and attentions that `transformers` collects by hooks, hooks of a user, and what the
step keeps. Router logits are those of `test_expert_losses`; attributes of layers are in the corpus.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parity.cases import Record, difference, trained
from tests.parity.networks import VOCABULARY, WIDTH, decoder, in_float64
from tests.parity.rows import rows_on_ranks

LENGTH, LAYERS = 10, 4
BATCH, STEPS, RANKS = 6, 5, 3


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


class Inspected(Case):
    """Hidden states and attentions of all layers in the loss."""

    def __init__(self) -> None:
        super().__init__()
        options = {"num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager"}
        config = LlamaConfig(**{**decoder(LAYERS), **options})
        self.network = in_float64(LlamaForCausalLM(config))

    def loss(self, ids: Tensor) -> Tensor:
        output = self.network(input_ids=ids, output_hidden_states=True, output_attentions=True)
        assert len(output.hidden_states) == LAYERS + 1
        assert len(output.attentions) == LAYERS
        hidden = sum(state.pow(2).mean() * (i + 1) for i, state in enumerate(output.hidden_states))
        sure = sum(attention.pow(3).mean() for attention in output.attentions)
        return causal_loss(output.logits, ids) + 0.1 * hidden - sure


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Blocks(Case):
    """Blocks behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).mT, ids)


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


# Row: network, arguments of the strategy.
OF_LLAMA, OF_BLOCKS = {"pipeline": "network.model.layers"}, {"pipeline": "layers"}
ROWS: dict[str, tuple[type[Case], dict[str, Any]]] = {
    "Llama": (Inspected, {**OF_LLAMA, "microbatches": 3}),
    "Llama recomputed": (Inspected, {**OF_LLAMA, "microbatches": 2, "recompute": "sqrt"}),
    "hooks": (Hooks, {**OF_BLOCKS, "microbatches": 3}),
    "hooks recomputed": (Hooks, {**OF_BLOCKS, "microbatches": 3, "recompute": 2}),
}


def train(row: str, strategy: Any = "auto", ranks: int = 1) -> Record:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (BATCH * STEPS, LENGTH), generator=generator)
    loaders = (DataLoader(part, batch_size=BATCH) for part in (ids, ids[:12]))
    return trained(ROWS[row][0], strategy, ranks, *loaders, max_epochs=1)


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Record]]:
    """The records of every row on every rank."""
    return rows_on_ranks(RANKS, train, {row: own for row, (_, own) in ROWS.items()})


@pytest.mark.parametrize("row", ROWS)
def test_what_layers_emit_reaches_the_loss_on_ranks(
    row: str, runs: list[dict[str, Record]]
) -> None:
    expected = train(row)
    assert len(expected.validated) == 1
    for records in runs:
        assert difference(expected, records[row]) <= 1e-12
