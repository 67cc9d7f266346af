"""Recommenders, tables, graphs and reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.corpus.harness import entry
from tests.corpus.modules import numbers

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
