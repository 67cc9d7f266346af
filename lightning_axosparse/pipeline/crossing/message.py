"""The values that stages send each other in a step, and how they are sent.

A step may read on one stage values that another stage has computed: the output of an earlier layer,
results of code between layers, values that forward hooks or attributes of a layer hold. The first
micro-batch is run once as a probe, in which every value is sent and each stage records those that
it reads; from then on a stage sends the values that later stages have read, and no others.

Tensors may be sent inside of any object, such as dataclasses, namespaces, sets and the user's own
classes, and their gradients come back. Between ranks a message is a header and a block of bytes.
The header has the shapes, so these may change from one batch to the next.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.pipeline.rerun import Rerun
from lightning_axosparse.support.object_trees import put_together, take_apart
from lightning_axosparse.support.torch_internals import is_dtensor
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:  # It starts MPI, which is not needed for stages in one process.
    from lightning_axosparse.distributed.mpi.transport import Channel


class Place(NamedTuple):
    """Identifies a tensor that a step computes from outputs of layers.

    For example::

        h = self.layers[0](x)  # Place(layer=0, result=0, leaf=0)
        a, b = h.chunk(2)      # Place(0, 1, 0) and Place(0, 1, 1)
        c = a + b              # Place(0, 2, 0)
        h = self.layers[1](c)  # Place(1, 0, 0)

    Attributes:
        layer: the layer that was called last.
        result: number of the result since then; 0 is the layer's output.
        leaf: index among the tensors in the result.
    """

    layer: int
    result: int
    leaf: int


ARGUMENT = "argument"
"""The name of a side output that is an argument of the layer, which it has changed in place."""


class SidePlace(NamedTuple):
    """Identifies a side output of a layer, or a tensor in it.

    Attributes:
        layer: the layer.
        module: path of the module in it.
        name: the attribute, the registry of a hook, or ``ARGUMENT``.
        position: of the hook in its registry, or of the argument; -1 for an attribute.
        leaf: index among the tensors in the side output; -1 for the side output itself.
    """

    layer: int
    module: str
    name: str
    position: int = -1
    leaf: int = -1

    @property
    def of_attribute(self) -> bool:
        """Whether the value is an attribute."""
        return self.position < 0

    @property
    def whole(self) -> SidePlace:
        """The place of the side output that holds this tensor."""
        return self._replace(leaf=-1)


Value = Place | SidePlace


@dataclass
class StageReads:
    """The values that one stage reads in a probe.

    Attributes:
        read: those of earlier stages, and side outputs of earlier layers that its hooks store.
        side_outputs: the side outputs of its own layers.
        is_complete: whether the step has reached the stage and called its layers.
        numbers: whether Python has read a number from a value between layers.
    """

    read: set[Value] = field(default_factory=set)
    side_outputs: set[SidePlace] = field(default_factory=set)
    is_complete: bool = False
    numbers: bool = False


class _Everything:
    def __contains__(self, value: object) -> bool:
        return True


class SentValues:
    """The values that one stage sends to the next.

    Args:
        read: the values that later stages read; None if that is not known: then all are sent.
        side_outputs: those that layers had in the probe; others are sent.
    """

    def __init__(
        self, read: frozenset[Value] | None = None, side_outputs: frozenset[SidePlace] = frozenset()
    ) -> None:
        self.values: Container[Any] = _Everything() if read is None else read
        """The values between layers that are sent."""
        self.last_computed = max(
            (value.layer for value in read or () if isinstance(value, Place) and value.result),
            default=-1 if read is not None else float("inf"),
        )
        """The last layer behind which code computes such a value."""
        self._side_outputs = side_outputs

    def sends_side_output(self, place: SidePlace) -> bool:
        """Whether a side output, or a tensor in it, is sent."""
        return place in self.values or place not in self._side_outputs


Crossing: TypeAlias = tuple[SentValues, ...]
"""The values that each stage sends."""


def crossing_of(stages: Mapping[int, StageReads]) -> Crossing | None:
    """Return the values that each stage has to send; None if a probe did not reach all stages."""
    if not all(reads.is_complete for reads in stages.values()):
        return None
    side_outputs = frozenset(place for reads in stages.values() for place in reads.side_outputs)
    return tuple(SentValues(_read_behind(stage, stages), side_outputs) for stage in sorted(stages))


def _read_behind(stage: int, stages: Mapping[int, StageReads]) -> frozenset[Value]:
    """Return the values that later stages read, and the side outputs that hold them."""
    later = (reads.read for number, reads in stages.items() if number > stage)
    read = frozenset[Value]().union(*later)
    return read | {value.whole for value in read if isinstance(value, SidePlace)}


class SideOutput(NamedTuple):
    """A value that a layer stores in addition to its output.

    Attributes:
        place: identifies it.
        value: the arguments of a hook inside the layer; a tensor, list or dict that the layer has
            set as an attribute of one of its modules; or an argument that it has changed in place.
        is_appended: whether the value holds only the items that the layer has appended to a list.
        is_output: whether an attribute is, or holds, the layer's output.
    """

    place: SidePlace
    value: Any
    is_appended: bool = False
    is_output: bool = False


class Activation(NamedTuple):
    """The content of a message to the next stage.

    Gradients come back for its tensors, in their order. Objects of classes that torch does not know
    are taken apart, and put together where the step gets them.

    Attributes:
        output: of the stage's last layer, with descriptions of the tensors that no stage reads.
        values: other tensors, computed from outputs of layers, that later stages read.
        forms: outputs of layers that differ in form from the last one's, as descriptions.
        is_changed: whether the step has changed the output in place.
        side_outputs: of all layers so far.
        fingerprint: of the batch.
        is_empty: whether the step has ended on the stage, without calling a layer.
        failed: why the batch has to run again, if it has; in a probe or a comparison, the step may
            have raised an error.
        numbers: those that Python has read from values between layers.
    """

    output: Any = None
    values: tuple[tuple[Place, Tensor], ...] = ()
    forms: tuple[tuple[int, Any], ...] = ()
    is_changed: bool = False
    side_outputs: tuple[SideOutput, ...] = ()
    fingerprint: int = 0
    is_empty: bool = False
    failed: Rerun | None = None
    numbers: tuple[Any, ...] = ()


class Gradients(NamedTuple):
    """The content of a message to the previous stage, for one micro-batch.

    Attributes:
        tensors: the gradient of each tensor of the activation; None for a tensor without gradient.
        rerun: why the gradients are dropped and the batch has to run again; None if it has not.
    """

    tensors: Sequence[Tensor | None]
    rerun: Rerun | None = None


class Message(NamedTuple):
    """A message that has arrived, or was sent.

    Attributes:
        content: an ``Activation`` or ``Gradients``.
        tensors: those in it, in order; in a message that has arrived, leaves of a new graph.
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
        activations: messages from the previous stage that are not yet used, oldest first.
        gradients: messages from the next stage that are not yet used, oldest first.
    """

    def __init__(self) -> None:
        self.activations: deque[Message] = deque()
        self.gradients: deque[Message] = deque()

    def begin(self, activations: int, gradients: int) -> None:
        """Prepare to receive these numbers of messages in this batch."""

    def send_activation(self, activation: Activation) -> Sequence[Tensor]:
        """Send to the next stage without waiting; return the tensors in the activation."""
        raise NotImplementedError

    def send_gradient(self, gradients: Gradients) -> None:
        """Send to the previous stage without waiting."""

    def poll(self) -> None:
        """Progress messages, and append those that have arrived to the deques."""

    def end(self) -> None:
        """Wait until all messages of this batch have left."""


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
        """Decode the messages that have arrived from both adjacent stages."""
        for channel, arrived in (
            (self._previous, self.activations),
            (self._following, self.gradients),
        ):
            if channel is not None:
                channel.poll()
                while channel.arrived:
                    arrived.append(decode(*channel.arrived.popleft()))

    def end(self) -> None:
        """Wait until all messages of this batch have left."""
        for channel in (self._previous, self._following):
            if channel is not None:
                channel.end()


class LoopbackLink(Link):
    """The link of a stage whose adjacent stages are in the same process.

    For notebooks, debuggers and tests; the schedule and all other code are those used between
    ranks.
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
        tensors, message = detached_message(activation)
        self._next.activations.append(message)
        return tensors

    def send_gradient(self, gradients: Gradients) -> None:
        """Pass them to the previous stage."""
        assert self._previous is not None
        self._previous.gradients.append(Message(gradients, ()))


class _PackedTensor(NamedTuple):
    """A tensor of a message whose bytes begin at ``offset`` of the block."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    offset: int

    def read(self, block: Tensor) -> Tensor:
        end = self.offset + self.dtype.itemsize * self.shape.numel()
        tensor = block[self.offset : end].view(self.dtype).view(self.shape)
        return tensor.requires_grad_(self.requires_grad)


def encode(tree: Any, device: torch.device) -> tuple[bytes, Tensor, Sequence[Tensor]]:
    """Convert any object to a header and the bytes of its tensors (1-D uint8, on ``device``).

    A single contiguous tensor on ``device`` is not copied, so it must not change until the message
    has left.

    Returns:
        The header, the bytes, and the tensors in their order.

    Raises:
        CannotPickle: if the object cannot be sent.
    """
    rest, tensors = take_apart(tree, Tensor)
    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    packed, end = list[_PackedTensor](), 0
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
        packed.append(_PackedTensor(tensor.shape, tensor.dtype, tensor.requires_grad, offset))
    block = pieces[1] if len(pieces) == 2 else torch.cat(pieces)
    return pickle.dumps((rest, packed)), block, tensors


def decode(header: bytes, block: Tensor) -> Message:
    """Rebuild the object; its tensors are leaves of a new graph, and views of the block."""
    rest, packed = pickle.loads(header)
    tensors = [each.read(block) for each in packed]
    return Message(put_together(rest, tensors), tensors)


def detached_message(tree: Any) -> tuple[Sequence[Tensor], Message]:
    """Do as :func:`encode` and :func:`decode`, in one process and without copying tensors.

    Returns:
        The tensors in the object, and a message with them detached.
    """
    rest, tensors = take_apart(tree, Tensor)
    detached = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    return tensors, Message(put_together(rest, detached), detached)
