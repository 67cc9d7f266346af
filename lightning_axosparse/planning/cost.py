"""Describes the costs of a model (work, memory, messages) and the speed of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_axosparse.planning.simulate import Numbers, Wire
from lightning_axosparse.sparse.kernels import SEGMENT
from lightning_axosparse.sparse.store.layout import BLOCK_ENTRIES


@dataclass(frozen=True)
class Storage:
    """Bytes of one weight's state: the weight, its gradient, optimizer state and index.

    At a density f of the weights and with an index of i bytes per unpruned weight, they are

    | compute | float32 | bf16-mixed, 16-mixed | bf16-true |
    | --- | --: | --: | --: |
    | dense weights, Adam | 16 | 16 | 8 |
    | all but samo | (16 + i) f | (16 + i) f | (16 + i) f |
    | samo | (16 + i) f + 4 | (16 + i) f + 2 | (16 + i) f + 2 |

    where 16 is a float32 master value, its gradient and the two moments of Adam. SAMO's own figure
    is 24 f + 2 against 20 (Singh & Bhatele, IPDPS 2023): i = 4, a 16-bit gradient beside the
    float32 one (2 f), and a 16-bit copy of the unpruned values while weights are materialized (2
    f); here are neither.

    Temporary memory is not counted: the dense matrix of one operator, 16-bit copies of weights
    under autocast, buffers of messages and of the all-reduce.

    Attributes:
        per_weight: bytes per weight, pruned or not.
        per_unpruned: further bytes per unpruned weight.
        gradient: bytes of an unpruned weight's gradient in the data-parallel all-reduce.
        optimizer: bytes of an unpruned weight's optimizer state, which are among ``per_unpruned``.
        fixed: bytes per device, independent of the number of weights.
    """

    per_weight: float
    per_unpruned: float
    gradient: float
    optimizer: float = 0.0
    fixed: float = 0.0

    def sharded(self, replicas: int) -> Storage:
        """Return the storage of one of the replicas that shard the optimizer state (ZeRO 1)."""
        shard = self.optimizer / replicas
        per_unpruned = self.per_unpruned - self.optimizer + shard
        return replace(self, per_unpruned=per_unpruned, optimizer=shard)

    def state_bytes(self, weights: Numbers, pruning_ratio: float) -> Numbers:
        """Return the bytes of state of ``weights`` weights, ``pruning_ratio`` of them pruned."""
        return weights * (self.per_weight + (1 - pruning_ratio) * self.per_unpruned) + self.fixed

    def reduced_bytes(self, weights: Numbers, pruning_ratio: float) -> Numbers:
        """Return the bytes that the data-parallel all-reduce sends for ``weights`` weights."""
        return weights * (1 - pruning_ratio) * self.gradient


DENSE = Storage(per_weight=0, per_unpruned=16, gradient=4, optimizer=8)
"""Float32 weights with their gradients and the two moments of Adam."""

SPARSE = replace(DENSE, per_weight=4 / BLOCK_ENTRIES + 2 / SEGMENT, per_unpruned=16 + 1)
"""Unpruned values in the index format "segments": one byte of index per unpruned weight, two per
segment, four per block."""


@dataclass(frozen=True)
class LayerCosts:
    """The cost of a model's layers, one entry per layer; work and activations per sample.

    Attributes:
        forward: work of the forward pass, in units of which a device does :attr:`Cluster.speed` a
            second.
        backward: work of the backward pass.
        recomputed: work of the second forward pass under activation checkpointing.
        weights: number of weights.
        activation_bytes: bytes of activations saved for the backward pass.
        output_bytes: bytes of the output, which the next stage receives.
        expert_weights: number of those weights that belong to experts; empty where there are none.
        token_bytes: bytes of all tokens, each as often as it has experts.
        shared_bytes: bytes that ranks which share a layer all-reduce in its forward pass, and as
            many in its backward pass; of an all-gather, half of its bytes.
        split_activation_bytes: the part of ``activation_bytes`` that is divided among such ranks.
        outside_weights: number of weights outside the layers, which every stage has.
        loss_bytes: bytes of temporary tensors between the last layer and the loss.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recomputed: tuple[float, ...]
    weights: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    expert_weights: tuple[float, ...] = ()
    token_bytes: tuple[float, ...] = ()
    shared_bytes: tuple[float, ...] = ()
    split_activation_bytes: tuple[float, ...] = ()
    outside_weights: float = 0.0
    loss_bytes: float = 0.0


@dataclass(frozen=True)
class Transformer:
    """A GPT-like decoder.

    Every stage has the embedding, which is tied to the head, as it has all parameters outside the
    pipelined layers.

    Attributes:
        layers: number of blocks, which are partitioned into stages.
        width: size of a token's hidden state.
        heads: attention heads.
        sequence: tokens per sample.
        vocabulary: size of the vocabulary.
        itemsize: bytes of one activation value.
        experts: MLPs of a block.
        top_k: the number of experts per token.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    itemsize: int = 2
    experts: int = 1
    top_k: int = 1

    @property
    def layer_weights(self) -> int:
        """Weights of one block."""
        return 4 * self.width**2 + self.expert_weights

    @property
    def expert_weights(self) -> int:
        """Weights of a block's MLPs."""
        return 8 * self.width**2 * self.experts

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding and the head tied to it."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """Weights of the full model."""
        return self.layers * self.layer_weights + self.embedding_weights

    @property
    def layer_flops(self) -> float:
        """Floating-point operations of a block's forward pass on one sample."""
        with_weights = (8 + 16 * self.top_k) * self.width**2 * self.sequence
        return with_weights + 4 * self.sequence**2 * self.width

    @property
    def head_flops(self) -> float:
        """Floating-point operations of the head's forward pass on one sample."""
        return 2 * self.sequence * self.width * self.vocabulary

    @property
    def message_bytes(self) -> float:
        """Bytes of one sample's hidden states."""
        return self.sequence * self.width * self.itemsize

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes of activations that a block saves per sample for its backward pass.

        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022:
        sbh (34 + 5as/h) bytes with 16-bit values, of which the MLP saves 19.
        """
        shared = (7 + 3 * self.top_k) * self.width * self.sequence * self.itemsize / 2
        return shared + self.split_activation_bytes

    @property
    def split_activation_bytes(self) -> float:
        """The part divided among ranks that share the block: sb (24h + 5as) of a dense one."""
        per_token = (8 + 16 * self.top_k) * self.width + 5 * self.heads * self.sequence
        return self.sequence * per_token * self.itemsize / 2

    @property
    def costs(self) -> LayerCosts:
        """The costs of the blocks; the last block's include the head."""

        def per_block(cost: float) -> tuple[float, ...]:
            return (cost,) * self.layers

        forward = (*per_block(self.layer_flops)[1:], self.layer_flops + self.head_flops)
        return LayerCosts(
            forward=forward,
            backward=tuple(2 * flops for flops in forward),
            recomputed=per_block(self.layer_flops),
            weights=per_block(self.layer_weights),
            activation_bytes=per_block(self.layer_activation_bytes),
            output_bytes=per_block(self.message_bytes),
            expert_weights=per_block(self.expert_weights if self.experts > 1 else 0),
            token_bytes=per_block(self.top_k * self.message_bytes if self.experts > 1 else 0),
            # After attention, and after the MLP; results of experts are gathered.
            shared_bytes=per_block((1.5 if self.experts > 1 else 2) * self.message_bytes),
            split_activation_bytes=per_block(self.split_activation_bytes),
            outside_weights=self.embedding_weights,
            loss_bytes=self.sequence * self.vocabulary * 4.0,
        )


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes with equal devices.

    Attributes:
        devices: number of devices.
        devices_per_node: devices of a node, which share its network.
        memory: bytes of memory per device.
        speed: work that a device does in a second, in the unit of :class:`LayerCosts`: mostly
            floating-point operations.
        memory_bandwidth: bytes per second at which the optimizer reads and writes model state.
        node: link between devices of a node.
        network: link between nodes.
    """

    devices: int
    devices_per_node: int
    memory: float
    speed: float
    memory_bandwidth: float
    node: Wire
    network: Wire

    def wires(self, g_inter: int) -> list[Wire]:
        """Return the links between successive stages; where replicas differ, the slower one."""
        return [
            self.node if self._inside_node(stage, g_inter) else self.network
            for stage in range(g_inter - 1)
        ]

    def ring(self, g_inter: int) -> Wire:
        """Return a link of a stage's data-parallel ring; the rings of a node share its network."""
        if self.devices <= self.devices_per_node:
            return self.node
        rings = min(g_inter, self.devices_per_node)
        bandwidth = min(self.node.bandwidth, self.network.bandwidth / rings)
        return Wire(self.network.latency, bandwidth)

    def exchange(self, apart: int, ranks: int) -> Wire:
        """Return a rank's link to the others of a group, whose rank numbers are ``apart``."""
        if apart * ranks <= self.devices_per_node:
            return self.node
        bandwidth = min(self.node.bandwidth, self.network.bandwidth / self.devices_per_node)
        return Wire(self.network.latency, bandwidth)

    def _inside_node(self, stage: int, g_inter: int) -> bool:
        ranks = range(stage, self.devices, g_inter)
        return all((rank % self.devices_per_node) + 1 < self.devices_per_node for rank in ranks)
