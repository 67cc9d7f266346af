"""Cost: the work, memory and messages of a model's layers, and the speed of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_axosparse.pipeline.simulate import Wire


@dataclass(frozen=True)
class LayerCosts:
    """What the layers of a model cost, one entry a layer; work, activations and messages a sample.

    Attributes:
        forward: work of the way forward, in the unit of which :attr:`Cluster.speed` counts so many
            a second.
        backward: work of the way back.
        again: work of another way forward, where layers are recomputed.
        weights: weights of each layer.
        kept_bytes: bytes that a layer keeps for its backward pass.
        output_bytes: bytes that a layer hands on.
        outside_weights: weights round the layers, which every stage holds.
        closing_bytes: bytes that live for a moment behind the last layer.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    again: tuple[float, ...]
    weights: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    outside_weights: float = 0.0
    closing_bytes: float = 0.0


@dataclass(frozen=True)
class Transformer:
    """A GPT-like decoder.

    The embedding, which is tied to the head, is held by every stage, as are all parameters round
    the pipelined layers in this package.

    Attributes:
        layers: number of blocks, which are dealt to the stages.
        width: size of a token's hidden state.
        heads: attention heads.
        sequence: tokens of a sample.
        vocabulary: tokens of the vocabulary.
        itemsize: bytes of one activation value.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    itemsize: int = 2

    @property
    def layer_weights(self) -> int:
        """Weights of one block."""
        return 12 * self.width**2

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding and the head tied to it."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """Weights of the whole model."""
        return self.layers * self.layer_weights + self.embedding_weights

    @property
    def layer_flops(self) -> float:
        """Floating-point operations of one sample's way forward through a block."""
        return (24 * self.width + 4 * self.sequence) * self.sequence * self.width

    @property
    def head_flops(self) -> float:
        """Floating-point operations of one sample's way forward through the head."""
        return 2 * self.sequence * self.width * self.vocabulary

    @property
    def message_bytes(self) -> float:
        """Bytes of one sample's hidden states."""
        return self.sequence * self.width * self.itemsize

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes that a block keeps of one sample for its backward pass.

        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022:
        sbh (34 + 5as/h) bytes with 16-bit values.
        """
        per_token = 34 * self.width + 5 * self.heads * self.sequence
        return self.sequence * per_token * self.itemsize / 2

    @property
    def costs(self) -> LayerCosts:
        """The costs of the blocks; the head's work stands with the last one's."""

        def each(cost: float) -> tuple[float, ...]:
            return (cost,) * self.layers

        forward = (*each(self.layer_flops)[1:], self.layer_flops + self.head_flops)
        return LayerCosts(
            forward=forward,
            backward=tuple(2 * flops for flops in forward),
            again=each(self.layer_flops),
            weights=each(self.layer_weights),
            kept_bytes=each(self.layer_activation_bytes),
            output_bytes=each(self.message_bytes),
            outside_weights=self.embedding_weights,
            closing_bytes=self.sequence * self.vocabulary * 4.0,
        )


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        devices: number of devices.
        devices_per_node: devices of a node, which share its network.
        memory: bytes of a device.
        speed: floating-point operations a device sustains in a second.
        memory_bandwidth: bytes a second at which a device walks through its model state.
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
        """The links between the stages of a replica; the slowest replica's where they differ."""
        return [
            self.node if self._inside_node(stage, g_inter) else self.network
            for stage in range(g_inter - 1)
        ]

    def ring(self, g_inter: int) -> Wire:
        """One edge of a stage's data-parallel ring; the rings of a node share its network."""
        if self.devices <= self.devices_per_node:
            return self.node
        rings = min(g_inter, self.devices_per_node)
        bandwidth = min(self.node.bandwidth, self.network.bandwidth / rings)
        return Wire(self.network.latency, bandwidth)

    def _inside_node(self, stage: int, g_inter: int) -> bool:
        ranks = range(stage, self.devices, g_inter)
        return all((rank % self.devices_per_node) + 1 < self.devices_per_node for rank in ranks)
