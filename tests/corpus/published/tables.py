"""Recommenders, tables, graphs and reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanSquaredError

from tests.corpus.harness import entry
from tests.corpus.modules import Rows, numbers

USERS, ITEMS = 11, 13
DOUBLE = {"precision": "64-true"}


class Ratings(L.LightningModule):
    @classmethod
    def loader(cls, seed: int) -> Any:
        generator = numbers(seed)
        users = torch.randint(USERS, (24,), generator=generator)
        items = torch.randint(ITEMS, (24,), generator=generator)
        ratings = 1.0 + (users * items) % 5
        return DataLoader(TensorDataset(users, items, ratings.float()), batch_size=8)


@entry(trainer=DOUBLE)
class NeuralCollaborativeFiltering(Ratings):
    def __init__(self) -> None:
        super().__init__()
        self.user_embedding, self.item_embedding = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.mlp = nn.Sequential(
            nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 8), nn.ReLU()
        )
        self.output = nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self.user_embedding(user), self.item_embedding(item)
        return self.output(torch.cat([self.mlp(torch.cat([u, i], -1)), u * i], -1)).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        user, item, rating = batch
        logits = self(user, item)
        loss = nn.BCEWithLogitsLoss()(logits, (rating > 3).to(logits.dtype))
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@entry(reason="It has no container of layers.")
class MatrixFactorization(Ratings):
    def __init__(self) -> None:
        super().__init__()
        self.P, self.Q = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        user, item, rating = batch
        out = (self.P(user) * self.Q(item)).sum(1)
        out = out + self.user_bias(user).squeeze() + self.item_bias(item).squeeze()
        return F.mse_loss(out, rating)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@entry(trainer=DOUBLE)
class DeepFM(Ratings):
    """First order, second order and a deep part on the same embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Embedding(USERS + ITEMS, 1)
        self.embed = nn.Embedding(USERS + ITEMS, 6)
        self.deep = nn.Sequential(
            nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
            nn.Linear(16, 1),
        )  # fmt: skip
        self.val_rmse = MeanSquaredError(squared=False)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        fields = torch.stack([user, item + USERS], 1)
        x = self.embed(fields)
        second = 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1)).sum(1)
        return self.linear(fields).sum((1, 2)) + second + self.deep(x.flatten(1)).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        user, item, rating = batch
        loss = F.mse_loss(self(user, item), rating)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        user, item, rating = batch
        self.val_rmse(self(user, item), rating)
        self.log("val_rmse", self.val_rmse)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=1e-2)


@entry(trainer=DOUBLE)
class FTTransformer(L.LightningModule):
    """Columns of a table as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.zeros(5, 8))
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))

    @classmethod
    def loader(cls, seed: int) -> Any:
        x = torch.randn(24, 5, generator=numbers(seed))
        return DataLoader(Rows(x=x, y=x.sum(1)), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"][..., None] * self.weight + self.bias
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        loss = F.huber_loss(self.head(x[:, 0]).squeeze(-1), batch["y"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=1e-5)


class Experience(IterableDataset):
    """Transitions, as a replay buffer samples them."""

    def __init__(self, seed: int) -> None:
        generator = numbers(seed)
        self.states = torch.randn(24, 4, generator=generator)
        self.actions = torch.randint(2, (24,), generator=generator)
        self.rewards = torch.randn(24, generator=generator)
        self.dones = torch.rand(24, generator=generator) < 0.1

    def __iter__(self) -> Iterator[Any]:
        for i in range(24):
            yield (
                self.states[i],
                self.actions[i],
                self.rewards[i],
                self.dones[i],
                self.states[(i + 1) % 24],
            )


class DQN(L.LightningModule):
    """Lightning's example of deep Q-learning; the target follows every few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.network()
        self.target_net = self.network()
        self.episode_reward, self.total_reward = 0.0, 0.0

    @staticmethod
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
        )

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(Experience(seed), batch_size=8)

    def dqn_mse_loss(self, batch: Any) -> Tensor:
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
            next_values = next_values.detach()
        return nn.MSELoss()(values, next_values * 0.99 + rewards)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.dqn_mse_loss(batch)
        if self.global_step % 2 == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"total_reward": self.total_reward, "train_loss": loss})
        self.log("steps", float(self.global_step), logger=False, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


@entry(trainer=DOUBLE)
class LightningDQN(DQN):
    """With the target beside the network, there are two containers."""

    pipeline = "net"


@entry(trainer=DOUBLE)
class ValueRegression(DQN):
    """Fitted Q-iteration without a target."""

    def __init__(self) -> None:
        super().__init__()
        del self.target_net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states, actions, rewards, _dones, _next = batch
        values = self.net(states).gather(1, actions[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(values, rewards)
        self.log("train_loss", loss)
        self.log("value", values.mean())
        return loss


class Graph:
    """Several small graphs as one, in one object, like those of torch_geometric."""

    def __init__(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> None:
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y

    @property
    def num_graphs(self) -> int:
        return len(self.y)

    def to(self, *args: Any, **kwargs: Any) -> Graph:
        parts = (self.x, self.edge_index, self.batch, self.y)
        return Graph(*(part.to(*args, **kwargs) for part in parts))


def graphs(seed: int) -> list[Graph]:
    generator, made = numbers(seed), []
    for _ in range(3):
        x = torch.randn(32, 5, generator=generator)
        offsets = 4 * torch.arange(8).repeat_interleave(4)
        edges = torch.stack([torch.arange(32), offsets + (torch.arange(32) + 1) % 4])
        owner = torch.arange(8).repeat_interleave(4)
        made.append(Graph(x, edges, owner, (x[::4, 0] > 0).long()))
    return made


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.itself, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        sums = torch.zeros_like(x).index_add_(0, target, x[source])
        return self.itself(x) + self.neighbours(sums)


class GraphNet(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GraphConv(5, 8), GraphConv(8, 8), GraphConv(8, 8)])
        self.head = nn.Linear(8, 2)

    def nodes(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)


@entry(reason="A batch that is one object is not cut.")
class UvAGraphLevel(GraphNet):
    """Classifies graphs: their nodes are averaged by graph."""

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(graphs(seed), batch_size=None)

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        x = self.nodes(data.x, data.edge_index)
        sums = torch.zeros(data.num_graphs, x.shape[1]).index_add_(0, data.batch, x)
        logits = self.head(sums / torch.bincount(data.batch)[:, None])
        loss = F.cross_entropy(logits, data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        self.log("train_acc", (logits.argmax(1) == data.y).float().mean(), batch_size=8)
        return loss


@entry(reason="One graph is the batch, which has no samples to cut.")
class UvANodeLevel(GraphNet):
    """Classifies the nodes of one graph, some of which are for training."""

    @classmethod
    def loader(cls, seed: int) -> Any:
        data = [(g.x, g.edge_index, g.x[:, 0].gt(0).long(), torch.arange(32) % 2 == 0)
                for g in graphs(seed)]  # fmt: skip
        return DataLoader(data, batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, edge_index, y, mask = batch
        logits = self.head(self.nodes(x, edge_index))
        loss = F.cross_entropy(logits[mask], y[mask])
        self.log("train_loss", loss, batch_size=1)
        return loss


@entry(trainer=DOUBLE)
class KnowledgeGraph(L.LightningModule):
    """Scores of triples, with corrupted ones that come with the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(USERS, 8), nn.Embedding(5, 8)
        self.scorer = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    @classmethod
    def loader(cls, seed: int) -> Any:
        generator = numbers(seed)
        triples = torch.randint(5, (24, 3), generator=generator)
        wrong = (triples[:, 2:] + torch.randint(1, USERS, (24, 4), generator=generator)) % USERS
        return DataLoader(TensorDataset(triples, wrong), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        triples, wrong = batch
        head, relation = self.entities(triples[:, 0]), self.relations(triples[:, 1])
        tails = self.entities(torch.cat([triples[:, 2:], wrong], 1))
        both = torch.cat([head, relation], -1)[:, None].expand(-1, 5, -1)
        scores = self.scorer(torch.cat([both, tails], -1)).squeeze(-1)
        loss = F.relu(1.0 - scores[:, :1] + scores[:, 1:]).mean()
        self.log("loss", loss)
        rank = (scores[:, 1:] >= scores[:, :1]).sum(1) + 1
        self.log("mrr", (1.0 / rank).mean())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)
