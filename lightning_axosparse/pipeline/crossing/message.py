"""What crosses the edges of stages in a step, and how it is sent.

A step may read on one stage what another stage has computed: the output of an earlier layer, what
code between layers has made of it, what forward hooks or attributes of a layer hold. What it reads
is seen in one run of its first micro-batch in which everything crosses; from then on each stage
sends what later stages have read, and nothing else.

Whatever holds tensors crosses with their gradients: dataclasses, namespaces, sets, the user's own
objects, too. Between ranks it is a header and a block of bytes. The header has shapes, so these may
change from one batch to the next.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.support.object_trees import put_together, take_apart
from lightning_axosparse.support.torch_internals import is_dtensor
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:  # It starts MPI, which the stages of one process do without.
    from lightning_axosparse.distributed.mpi.transport import Channel


class Place(NamedTuple):
    """Where a step makes a value from outputs of layers.

    Attributes:
        layer: the layer that was called last.
        result: number of the result since then; 0 is the layer's output.
        leaf: index among the tensors in the result.
    """

    layer: int
    result: int
    leaf: int


class SidePlace(NamedTuple):
    """Where a layer leaves a value beside its output.

    Attributes:
        layer: the layer.
        module: path of the module in it.
        name: the attribute, or the registry of a hook.
        position: of the hook in its registry; -1 for an attribute.
        leaf: index among the tensors in what is left; -1 for all of it.
    """

    layer: int
    module: str
    name: str
    position: int = -1
    leaf: int = -1

    @property
    def of_hook(self) -> bool:
        """Whether a hook is given the value; else it is an attribute."""
        return self.position >= 0

    @property
    def whole(self) -> SidePlace:
        """The place of all that the hook was given, or of the attribute."""
        return self._replace(leaf=-1)


Value = Place | SidePlace


@dataclass
class Reads:
    """What one stage does with the values of others, in the run in which all of them cross.

    Attributes:
        read: those of earlier stages that it reads, and the calls of hooks that leave something.
        seen: what hooks and attributes of its own layers hold.
        is_complete: whether the step has gone through the stage, and called its layers.
    """

    read: set[Value] = field(default_factory=set)
    seen: set[SidePlace] = field(default_factory=set)
    is_complete: bool = False


class _Everything:
    def __contains__(self, value: object) -> bool:
        return True


class Sent:
    """What one stage sends to the next.

    Args:
        read: what later stages read; None if that is not known.
        seen: what hooks and attributes were seen to hold; anything else is sent.
    """

    def __init__(
        self, read: frozenset[Value] | None = None, seen: frozenset[SidePlace] = frozenset()
    ) -> None:
        self.values: Container[Any] = _Everything() if read is None else read
        """Values between layers that are sent."""
        self.last_computed = max(
            (value.layer for value in read or () if isinstance(value, Place) and value.result),
            default=-1 if read is not None else float("inf"),
        )
        """The last layer behind which code computes such a value."""
        self._seen = seen

    def sends(self, value: SidePlace) -> bool:
        """Whether something beside a layer's output is sent."""
        return value in self.values or value not in self._seen


Crossing: TypeAlias = tuple[Sent, ...]
"""What crosses the edges of stages in a step: what each stage sends."""


def learned(stages: Mapping[int, Reads]) -> Crossing | None:
    """What is sent, by what each stage was seen to read; None if they did not see the step."""
    if not all(reads.is_complete for reads in stages.values()):
        return None
    seen = frozenset(place for reads in stages.values() for place in reads.seen)
    return tuple(
        Sent(_union(reads.read for later, reads in stages.items() if later > stage), seen)
        for stage in sorted(stages)
    )


def _union(sets: Iterable[set[Value]]) -> frozenset[Value]:
    """The values in some sets, and the calls of hooks that are given them."""
    union = frozenset[Value]().union(*sets)
    return union | {value.whole for value in union if isinstance(value, SidePlace)}


class SideOutput(NamedTuple):
    """What a layer has left beside its output.

    Attributes:
        place: where.
        value: the arguments of a hook inside the layer; or a tensor, list or dict that the layer
            has set as an attribute of one of its modules.
        is_appended: whether the value is what the layer has appended to such a list.
    """

    place: SidePlace
    value: Any
    is_appended: bool = False


class Activation(NamedTuple):
    """What a stage sends to the next.

    Gradients come back for its tensors, in their order.

    Attributes:
        output: of the stage's last layer, with descriptions of the tensors that no stage reads.
        values: what else of outputs of layers, and of what the step has made of them, is read.
        forms: outputs of layers that do not look like the last one's, with descriptions of tensors.
        is_changed: whether the step has changed the output in place.
        side_outputs: of all layers up to that.
        fingerprint: of the batch.
        is_empty: whether the step has ended on the stage, without calling a layer.
        has_failed: whether it has ended there by an error, in a run that only looks at the step.
    """

    output: Any = None
    values: tuple[tuple[Place, Tensor], ...] = ()
    forms: tuple[tuple[int, Any], ...] = ()
    is_changed: bool = False
    side_outputs: tuple[SideOutput, ...] = ()
    fingerprint: int = 0
    is_empty: bool = False
    has_failed: bool = False


class Gradients(NamedTuple):
    """What a stage sends back for a micro-batch.

    Attributes:
        tensors: the gradient of each tensor of the activation; None where there is none.
        factor: with the last micro-batch, what the gradients of the whole batch are still to be
            multiplied by (see ``loss.weights``); None where the batch has to run again.
    """

    tensors: Sequence[Tensor | None]
    factor: float | None


class Message(NamedTuple):
    """What has arrived, or was sent.

    Attributes:
        content: what was sent.
        tensors: those in it, in order; of what has arrived the leaves of a new graph.
    """

    content: Any
    tensors: Sequence[Tensor]


EMPTY = Activation()
NOTHING = Message(EMPTY, ())
"""The message of a stage that sends nothing."""

_ALIGNMENT = 16  # bytes; a multiple of every element size, so that each tensor can be a view


class Link:
    """One stage's connection to the adjacent stages.

    Messages of one direction arrive in the order in which they were sent.

    Attributes:
        activations: arrived from the previous stage and not yet used, oldest first.
        gradients: arrived from the next stage and not yet used, oldest first.
    """

    def __init__(self) -> None:
        self.activations: deque[Message] = deque()
        self.gradients: deque[Message] = deque()

    def begin(self, activations: int, gradients: int) -> None:
        """Prepare to receive so many messages of each direction in this batch."""

    def send_activation(self, activation: Activation) -> Sequence[Tensor]:
        """Send to the next stage without waiting; return the tensors in the activation."""
        raise NotImplementedError

    def send_gradient(self, gradients: Gradients) -> None:
        """Send to the previous stage without waiting."""

    def poll(self) -> None:
        """Progress messages, and append what has arrived to the deques."""

    def end(self) -> None:
        """Wait until everything sent in this batch has left."""


class ChannelLink(Link):
    """The link of a stage whose adjacent stages are other ranks."""

    def __init__(
        self, previous: Channel | None, following: Channel | None, device: torch.device
    ) -> None:
        super().__init__()
        self._previous, self._following, self._device = previous, following, device

    def begin(self, activations: int, gradients: int) -> None:
        """Post the receives of a batch."""
        if self._previous is not None:
            self._previous.begin(activations)
        if self._following is not None:
            self._following.begin(gradients)

    def send_activation(self, activation: Activation) -> Sequence[Tensor]:
        """Send to the next stage."""
        assert self._following is not None
        header, block, tensors = encode(activation, self._device)
        self._following.send(header, block)
        return tensors

    def send_gradient(self, gradients: Gradients) -> None:
        """Send to the previous stage."""
        assert self._previous is not None
        header, block, _ = encode(gradients, self._device)
        self._previous.send(header, block)

    def poll(self) -> None:
        """Decode what has arrived from both adjacent stages."""
        for channel, arrived in (
            (self._previous, self.activations),
            (self._following, self.gradients),
        ):
            if channel is not None:
                channel.poll()
                while channel.arrived:
                    arrived.append(decode(*channel.arrived.popleft()))

    def end(self) -> None:
        """Wait until everything sent has left."""
        for channel in (self._previous, self._following):
            if channel is not None:
                channel.end()


class LoopbackLink(Link):
    """The link of a stage whose adjacent stages are in the same process.

    The schedule and all other code are those used between ranks: for notebooks, debuggers, tests.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: LoopbackLink | None = None
        self._previous: LoopbackLink | None = None

    @classmethod
    def chain(cls, stages: int) -> list[LoopbackLink]:
        """Create the links of all stages of a pipeline."""
        links = [cls() for _ in range(stages)]
        for left, right in pairwise(links):
            left._next, right._previous = right, left
        return links

    def send_activation(self, activation: Activation) -> Sequence[Tensor]:
        """Pass it to the next stage."""
        assert self._next is not None
        sent, message = relink(activation)
        self._next.activations.append(message)
        return sent

    def send_gradient(self, gradients: Gradients) -> None:
        """Pass them to the previous stage."""
        assert self._previous is not None
        self._previous.gradients.append(Message(gradients, ()))


class _Block(NamedTuple):
    """A tensor of a message; its bytes begin at ``offset`` of the block."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    offset: int

    def read(self, block: Tensor) -> Tensor:
        end = self.offset + self.dtype.itemsize * self.shape.numel()
        tensor = block[self.offset : end].view(self.dtype).view(self.shape)
        return tensor.requires_grad_(self.requires_grad)


def encode(tree: Any, device: torch.device) -> tuple[bytes, Tensor, Sequence[Tensor]]:
    """Turn any object into a header and the bytes of its tensors (1-D uint8, on ``device``).

    A single contiguous tensor on ``device`` is not copied: it must not change until the message has
    left.

    Returns:
        The header, the bytes, and the tensors in their order.

    Raises:
        CannotPickle: if the object cannot be sent.
    """
    rest, tensors = take_apart(tree, Tensor)
    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    blocks, end = list[_Block](), 0
    for tensor in tensors:
        if is_dtensor(tensor):
            raise MisconfigurationException(
                f"A tensor of shape {tuple(tensor.shape)} goes to another stage as a DTensor, of "
                f"placements {tensor.placements}, but stages exchange plain tensors. Give the style"
                " of the layer that returns it use_local_output=True; where that is a whole layer "
                "of the pipeline, make it a part of one." + see("tensor-parallel")
            )
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        if offset > end:
            pieces.append(torch.zeros(offset - end, dtype=torch.uint8, device=device))
        pieces.append(tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8))
        end = offset + pieces[-1].numel()
        blocks.append(_Block(tensor.shape, tensor.dtype, tensor.requires_grad, offset))
    block = pieces[1] if len(pieces) == 2 else torch.cat(pieces)
    return pickle.dumps((rest, blocks)), block, tensors


def decode(header: bytes, block: Tensor) -> Message:
    """Make the object again; its tensors are leaves of a new graph, and views of the block."""
    rest, blocks = pickle.loads(header)
    tensors = [each.read(block) for each in blocks]
    return Message(put_together(rest, tensors), tensors)


def relink(tree: Any) -> tuple[Sequence[Tensor], Message]:
    """What :func:`encode` and :func:`decode` do, in one process and without copying tensors.

    Returns:
        The tensors in the object, and the message that arrives.
    """
    rest, sent = take_apart(tree, Tensor)
    arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent]
    return sent, Message(put_together(rest, arrived), arrived)
