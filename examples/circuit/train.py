"""A transformer of which 26 weights of 13,000 are left, on a toy task; draws their circuit.

``python train.py``, with ``pip install '.[cli]'``

The task: which quote closes a string? The one that opened it, while the other may stand inside.
"""

import argparse

import lightning as L
import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy, GradualPruning

TOKENS = [*"abcdef", "'", '"']
LENGTH = 8


def strings(count: int, seed: int) -> TensorDataset:
    """Return strings of random tokens that begin with a quote, and the quote that closes them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(len(TOKENS), (count, LENGTH), generator=generator)
    tokens[:, 0] = torch.randint(6, 8, (count,), generator=generator)
    return TensorDataset(tokens, tokens[:, 0])


class Transformer(L.LightningModule):
    """One block without norms, which would mix all channels."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.tokens = nn.Embedding(len(TOKENS), width)
        self.positions = nn.Embedding(LENGTH, width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, len(TOKENS))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        query = self.query(x[:, -1:])  # the last token predicts
        x = x[:, -1] + self.output(
            F.scaled_dot_product_attention(query, self.key(x), self.value(x)).squeeze(1)
        )
        x = x + self.down(F.relu(self.up(x)))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        tokens, closing = batch
        loss = F.cross_entropy(self(tokens), closing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, closing = batch
        right = (self(tokens).argmax(1) == closing).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.01)


def edges_of(model):
    """Yield the unpruned weights as edges ``(from, to, weight)``; a node is (column, index)."""
    layers = [  # each weight, and the columns that its inputs and outputs stand in
        (model.tokens.weight.T, "token", "embedded"),
        (model.positions.weight.T, "position", "embedded"),
        (model.query.weight, "embedded", "query"),
        (model.key.weight, "embedded", "key"),
        (model.value.weight, "embedded", "value"),
        (model.output.weight, "value", "attended"),
        (model.up.weight, "attended", "neuron"),
        (model.down.weight, "neuron", "final"),
        (model.head.weight, "final", "closing"),
    ]
    for weight, source, target in layers:
        values = weight.tolist()
        for row, column in weight.nonzero().tolist():
            yield (source, column), (target, row), values[row][column]
    for channel in range(model.head.in_features):  # the residual stream
        yield ("embedded", channel), ("attended", channel), 1.0
        yield ("attended", channel), ("final", channel), 1.0


def connected(edges):
    """Return the edges on a way from the inputs to the outputs, or to a query and its key."""
    partner = {"query": "key", "key": "query"}
    before = None
    while edges != before:
        before = edges
        inputs = {source for source, _, _ in edges if source[0] in ("token", "position")}
        read = inputs | {target for _, target, _ in edges}
        used = {source for source, _, _ in edges}
        used |= {node for node in read if node[0] == "closing"}
        used |= {node for node in read if (partner.get(node[0]), node[1]) in read}
        edges = [edge for edge in edges if edge[0] in read and edge[1] in used]
    return edges


COLUMNS = [
    ("token", "position"),
    ("embedded",),
    ("value", "key", "query"),
    ("attended",),
    ("neuron",),
    ("final",),
    ("closing",),
]
TITLES = ["inputs", "channels", "attention", "channels", "MLP", "channels", "closing quote"]


def draw(edges, file):
    """Draw the edges from left to right: positive weights red, negative ones blue."""
    nodes = {node for source, target, _ in edges for node in (source, target)}
    figure, axes = plt.subplots(figsize=(10, 5))
    places = {}
    for x, (kinds, title) in enumerate(zip(COLUMNS, TITLES, strict=True)):
        axes.text(x, 1.05, title, ha="center")
        own = sorted(nodes, key=lambda node: node[1])
        own = [node for kind in kinds for node in own if node[0] == kind]
        for n, (kind, index) in enumerate(own):
            place = places[kind, index] = x, 1 - (n + 0.5) / len(own)
            label = TOKENS[index] if kind in ("token", "closing") else str(index)
            if len(kinds) > 1:
                label = f"{kind} {label}"
            box = {"facecolor": "white", "edgecolor": "gray", "boxstyle": "round"}
            axes.text(*place, label, ha="center", va="center", fontsize=9, bbox=box)
    for source, target, weight in edges:
        ends = zip(places[source], places[target], strict=True)
        color = "tab:red" if weight > 0 else "tab:blue"
        axes.plot(*ends, color=color, linewidth=min(3.0, 0.5 + abs(weight)), zorder=1)
    axes.set_axis_off()
    figure.savefig(file, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratio", type=float, default=0.998)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--picture", default="circuit.svg")
    options = parser.parse_args()

    L.seed_everything(0)
    model = Transformer()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.epochs,
        strategy=AxoSparseStrategy(),
        callbacks=GradualPruning(options.ratio, start=0.1, end=0.7),
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        model,
        DataLoader(strings(8192, seed=0), batch_size=128, shuffle=True),
        DataLoader(strings(1024, seed=1), batch_size=256),
    )
    edges = connected(list(edges_of(model)))
    draw(edges, options.picture)
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
    print(f"{len(edges)} edges lead from inputs to outputs: see {options.picture}")
