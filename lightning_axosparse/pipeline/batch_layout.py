"""The layout of a batch: the leaves with one entry per sample, and their sample dimensions."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.support.troubleshooting import see

Path: TypeAlias = tuple[str, ...]
"""The path to a leaf of a batch: ``("['x']", "[0]")`` for ``batch['x'][0]``."""

_PLAIN = (str, bytes, int, float, complex, bool, Enum, type(None), np.generic)


@dataclass(frozen=True)
class BatchLayout:
    """How the batches of a loader are split; can be pickled.

    Attributes:
        dims: the sample dimension of each leaf that is split; 0 for lists and tuples with one entry
            per sample.
        whole: the leaves that every micro-batch gets whole.
        objects: those of ``whole`` that are neither arrays nor plain values, so that it is unknown
            whether they have one entry per sample.
    """

    dims: Mapping[Path, int]
    whole: tuple[Path, ...] = ()
    objects: tuple[Path, ...] = ()

    def sizes(self, batch: Any) -> dict[Path, int]:
        """Return the number of samples in each leaf that is split; equal in a valid batch."""
        return {
            path: node.shape[self.dims[path]] if is_array(node) else len(node)
            for path, node in self.leaves(batch)
        }

    def leaves(self, batch: Any) -> Iterator[tuple[Path, Any]]:
        """Return the leaves that are split, with their paths."""
        return ((path, node) for path, node in nodes(batch, self.dims) if path in self.dims)

    def fits(self, batch: Any) -> bool:
        """Whether a batch has the same leaves as the batch from which the layout was inferred."""
        reached = {path for path, node in nodes(batch, self.dims) if _may_have_samples(node)}
        known = set(self.dims) | set(self.whole)
        present = {path for path, node in nodes(batch, self.dims) if node is not None}
        cut = present & set(self.dims)
        return cut == set(self.dims) and reached <= known

    def cut(self, batch: Any, lo: int, hi: int) -> Any:
        """Return the samples from ``lo`` up to ``hi``, in the batch's own types."""
        return self._cut(batch, (), slice(lo, hi))

    def _cut(self, node: Any, path: Path, part: slice) -> Any:
        if path in self.dims:
            if isinstance(node, Tensor) and node.layout is not torch.strided:
                rows = torch.arange(part.start, part.stop, device=node.device)
                return node.index_select(self.dims[path], rows)
            if is_array(node):
                cut = node[(slice(None),) * self.dims[path] + (part,)]
                # A tensor with its own version counter, as a step may change it in place.
                return cut.data if isinstance(cut, Tensor) and not cut.requires_grad else cut
            return _like(node, node[part])
        entries = {} if is_plain(node) else children(node)
        cut = {key: self._cut(child, (*path, key.text), part) for key, child in entries.items()}
        if all(cut[key] is child for key, child in entries.items()):
            return node
        return rebuilt(node, cut)

    def __str__(self) -> str:
        by_dim: dict[int, list[str]] = {}
        for path, dim in self.dims.items():
            by_dim.setdefault(dim, []).append(path_text(path))
        texts = [
            f"{', '.join(paths)} along dimension {dim}" for dim, paths in sorted(by_dim.items())
        ]
        cut = "cut " + "; ".join(texts) if texts else "nothing is cut"
        whole = ", ".join(path_text(path) for path in self.whole)
        return f"{cut}; passed whole: {whole}" if whole else cut


class Key(NamedTuple):
    """The key or index of an entry of a container, and its text: ``['x']``, ``[0]``, ``.x``."""

    value: Any
    text: str


def path_text(path: Path) -> str:
    """Return a path as a user would write it."""
    return "batch" + "".join(path)


def is_array(node: Any) -> bool:
    """Whether a leaf is a tensor or a numpy array."""
    return isinstance(node, (Tensor, np.ndarray))


def children(node: Any) -> dict[Key, Any]:
    """Return the entries of a mapping, a list, a tuple or a dataclass; none of anything else."""
    if isinstance(node, Mapping):
        return {Key(key, f"[{key!r}]"): value for key, value in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return {Key(i, f".{name}"): node[i] for i, name in enumerate(node._fields)}
    if isinstance(node, (list, tuple)):
        return {Key(i, f"[{i}]"): value for i, value in enumerate(node)}
    if is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in fields(node) if hasattr(node, field.name)]
        return {Key(name, f".{name}"): getattr(node, name) for name in names}
    return {}


def rebuilt(node: Any, entries: Mapping[Key, Any]) -> Any:
    """Copy a container with other entries."""
    if isinstance(node, Mapping):
        return _rebuilt_mapping(node, {key.value: value for key, value in entries.items()})
    if isinstance(node, tuple) and hasattr(node, "_make"):
        return node._make(entries.values())
    if isinstance(node, (list, tuple)):
        return _like(node, list(entries.values()))
    other = copy.copy(node)
    for key, value in entries.items():
        # Also where the dataclass is frozen.
        object.__setattr__(other, key.value, value)
    return other


def copied_batch(node: Any) -> Any:
    """Copy a batch, so that a step may change its tensors, arrays and containers."""
    if isinstance(node, Tensor):
        return node.detach().clone().requires_grad_(node.requires_grad)
    if isinstance(node, np.ndarray):
        return node.copy()
    if type(node) is list or type(node) is tuple:
        return type(node)([e if isinstance(e, _PLAIN) else copied_batch(e) for e in node])
    if type(node) is dict:
        return {key: copied_batch(each) for key, each in node.items()}
    entries = children(node)
    if not entries:
        return node
    return rebuilt(node, {key: copied_batch(each) for key, each in entries.items()})


def validate_without_graph(batch: Any) -> None:
    """Check that a batch has no graph: steps get copies of it, which would cut the graph."""
    waiting = [batch]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Tensor):
            waiting += [] if isinstance(node, _PLAIN) else children(node).values()
        elif node.grad_fn is not None:
            raise MisconfigurationException(
                "A hook such as on_after_batch_transfer computes the batch with trained "
                "parameters, which would get no gradients: stages run the step on copies of the "
                "batch. Compute this in the step, before the layers, or under torch.no_grad()."
                + see("batches")
            )


def arrays(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors and numpy arrays in a batch that have a dimension, in order."""
    return ((path, leaf) for path, leaf in nodes(node, {}, path) if is_array(leaf) and leaf.ndim)


def nested_lists(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the lists and tuples in a batch, itself included, outermost first."""
    if _is_list(node):
        yield path, node
    for key, child in ({} if is_plain(node) else children(node)).items():
        yield from nested_lists(child, (*path, key.text))


def collated(batch: Any) -> BatchLayout:
    """Return the layout of a batch of torch's ``default_collate``: dimension 0 of all arrays.

    Args:
        batch: the batch: arrays, and lists or tuples of one string per sample.
    """

    def is_cut(path: Path, node: Any) -> int | None:
        if is_array(node):
            return 0 if node.ndim else None
        texts = isinstance(node, (list, tuple)) and len(node) > 0
        return 0 if texts and all(isinstance(entry, (str, bytes)) for entry in node) else None

    return _laid_out(batch, is_cut)


def inferred(batch: Any, batch_size: int | None = None) -> BatchLayout:
    """Infer the layout from one batch alone, in which all first dimensions must agree.

    A single vector, from a loader without a batch size, may be the features or the tokens of one
    sample: it stays whole, which is always right.

    Args:
        batch: the batch.
        batch_size: samples in a full batch of its loader; this one may have fewer.

    Raises:
        ValueError: if it is not clear whether a leaf has to be split; it names the leaf.
    """
    samples = _count(batch, batch_size)
    if samples is None:
        return _laid_out(batch, lambda path, node: None)

    def is_cut(path: Path, node: Any) -> int | None:
        if is_array(node):
            if node.ndim and node.shape[0] != samples:
                raise ValueError(_disagreement(batch, path, node, samples))
            return 0 if node.ndim else None
        if not _is_list(node) or not path or len(node) != samples:
            return None
        firsts = [leaf.shape[0] for _, leaf in arrays(node)]
        return None if firsts and all(first == samples for first in firsts) else 0

    return _laid_out(batch, is_cut)


def _count(batch: Any, batch_size: int | None) -> int | None:
    """Infer the number of samples in a batch; None if it cannot be split."""
    if batch_size is None and [leaf.ndim for _, leaf in arrays(batch)] == [1]:
        return None
    lists: dict[Path, Any] = {}  # The outermost lists below the batch itself.
    for path, node in nested_lists(batch):
        if path and not _is_below(path, lists) and any(True for _ in arrays(node)):
            lists[path] = node
    firsts: dict[Path, int] = {path: leaf.shape[0] for path, leaf in arrays(batch)}
    outside = [first for path, first in firsts.items() if not _is_below(path, lists)]
    lengths = {len(node) for node in lists.values()}
    if batch_size is not None and batch_size in {*outside, *lengths}:
        return batch_size
    if outside:
        return Counter(outside).most_common(1)[0][0]
    if not lists:
        return None
    if len(lists) > 1 and len(lengths) == 1 and len(set(firsts.values())) > 1:
        return lengths.pop()
    path, node = next(iter(lists.items()))
    raise ValueError(
        f"{path_text(path)} is a list of {len(node)} entries that hold tensors, and nothing tells "
        "whether it has an entry for each sample or whether each entry is a batch"
    )


def _is_below(path: Path, paths: Iterable[Path]) -> bool:
    return any(path[: len(above)] == above for above in paths)


def _disagreement(batch: Any, path: Path, node: Any, samples: int) -> str:
    agreeing = [
        path_text(other)
        for other, leaf in arrays(batch)
        if other != path and leaf.shape[0] == samples
    ]
    shape = tuple(node.shape)
    return (
        f"it is not clear how to cut {path_text(path)} of shape {shape}, as "
        f"{', '.join(agreeing) or 'the loader'} has {samples} samples"
    )


def _laid_out(batch: Any, dim_of: Callable[[Path, Any], int | None]) -> BatchLayout:
    """Make a layout by the sample dimension that ``dim_of`` returns for each node, outermost first.

    It returns None for a node that is not split itself, whose entries are visited then.
    """
    dims: dict[Path, int] = {}
    whole: list[Path] = []
    objects: list[Path] = []
    waiting: list[tuple[Path, Any]] = [((), batch)]
    while waiting:
        path, node = waiting.pop()
        dim = dim_of(path, node)
        entries = children(node)
        if dim is not None:
            dims[path] = dim
        elif entries and not is_plain(node):
            below = [((*path, key.text), child) for key, child in entries.items()]
            waiting += reversed(below)
        elif node is not None and not (_is_container(node) and not entries):
            whole.append(path)
            if not is_plain(node) and not is_array(node):
                objects.append(path)
    return BatchLayout(dims, tuple(whole), tuple(objects))


def nodes(node: Any, stop: Mapping[Path, int], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a batch; containers at the paths in ``stop`` count as leaves."""
    entries = {} if path in stop or is_plain(node) else children(node)
    if not entries:
        yield path, node
    for key, child in entries.items():
        yield from nodes(child, stop, (*path, key.text))


def _may_have_samples(node: Any) -> bool:
    """Whether a leaf may contain samples: an array with a dimension, or an unknown object."""
    if is_array(node):
        return bool(node.ndim)
    return not is_plain(node) and not _is_container(node)


def _is_list(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields")


def _is_container(node: Any) -> bool:
    return isinstance(node, (Mapping, list, tuple))


def is_plain(node: Any) -> bool:
    """Whether a node is a plain value, or a list of nothing else."""
    if _is_list(node):
        return bool(node) and all(isinstance(entry, _PLAIN) for entry in node)
    return isinstance(node, _PLAIN)


def _rebuilt_mapping(node: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if not isinstance(node, MutableMapping):
        return type(node)(entries)  # type: ignore[call-arg]
    other = copy.copy(node)
    for key, value in entries.items():
        other[key] = value
    return other


def _like(node: Any, entries: Any) -> Any:
    """Return the entries as a list or tuple of the node's own type."""
    return entries if type(entries) is type(node) else type(node)(entries)
