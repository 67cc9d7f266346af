"""Merges what a step returns for the micro-batches of a batch, and takes the loss out of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_axosparse.pipeline.batch_layout import arrays, children, is_array, rebuilt
from lightning_axosparse.pipeline.loss.combination import Rule, combine
from lightning_axosparse.pipeline.loss.terms import Term
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.state.values import same
from lightning_axosparse.support.troubleshooting import see


class Scalar(NamedTuple):
    """A scalar that a step returned, how it was computed, and how it combines, if that is known."""

    value: Tensor
    term: Term
    rule: Rule | None = None


def loss_alone(output: Any) -> Any:
    """The loss of an output, in the same structure: the part that is small whatever it is made of.

    Args:
        output: what a step returned, or its merged form.

    Returns:
        A scalar itself; of a mapping a dict with its "loss", if it has one; None of anything else.
    """
    if isinstance(output, Mapping):
        return {"loss": output["loss"]} if _is_scalar(output.get("loss")) else {}
    return output if _is_scalar(output) else None


def with_loss(output: Any, loss: Any) -> Any:
    """An output whose loss is another one.

    Args:
        output: what a step returned.
        loss: as :func:`loss_alone` returns it; None to leave the output as it is.
    """
    if isinstance(output, MutableMapping):
        output.update(loss)
    return output if loss is None or isinstance(output, Mapping) else loss


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Scalar | float | int) or (
        isinstance(value, Tensor) and not value.dim()
    )


def merge(outputs: Sequence[Any], microbatches: Sequence[MicroBatch], share: float = 1.0) -> Any:
    """Merge what a step returned for the micro-batches of a batch.

    Tensors and arrays with dimensions are concatenated, scalars combined as they were computed,
    containers merged entry by entry, lists of plain values or of one entry per sample joined. A
    value that some micro-batches did not return, or returned as None, is merged from the others. An
    int that equals each micro-batch's number of samples is added up. Of any other value the first
    is kept, with a warning if they differ.

    Args:
        outputs: what a step returned for each micro-batch, its scalar tensors as :class:`Scalar`.
        microbatches: the micro-batches.
        share: of the batch that they make up.

    Raises:
        ValueError: if micro-batches returned different types under one key.
    """
    if len(outputs) == 1:
        return plain(outputs[0])
    parts = [
        _Returned(out, part.weight / (share or 1.0), part.size)
        for out, part in zip(outputs, microbatches, strict=True)
    ]
    return _merged(parts, "")


def plain(output: Any) -> Any:
    """What a step returned, with tensors in place of each :class:`Scalar`."""
    return apply_to_collection(output, Scalar, lambda scalar: scalar.value)


class _Returned(NamedTuple):
    """What the step returned for one micro-batch, or an entry of it."""

    value: Any
    weight: float
    size: int


def _merged(parts: Sequence[_Returned], path: str) -> Any:
    parts = _present(parts)
    if not parts:
        return None
    outputs = [part.value for part in parts]
    first = outputs[0]
    _validate_kinds(outputs, path)
    if isinstance(first, Scalar):
        weights = [part.weight for part in parts]
        combined = combine([out.term for out in outputs], weights, _common_rule(outputs))
        return torch.as_tensor(combined).to(first.value)
    if isinstance(first, Tensor):
        return torch.cat(outputs, _batch_dim(parts))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs, _batch_dim(parts))
    if isinstance(first, (np.ndarray, float, np.floating)):
        return sum(part.value * part.weight for part in parts)
    if isinstance(first, (list, tuple)) and _is_joined(parts):
        return type(first)(entry for out in outputs for entry in out)
    if any(children(out) for out in outputs):
        return _merged_entries(parts, path)
    is_int = isinstance(first, int) and not isinstance(first, bool)
    if is_int and all(part.value == part.size for part in parts):
        return sum(outputs)
    if not all(same(out, first) for out in outputs):
        warnings.warn(
            f"The micro-batches of a batch returned different values in output{path} ({first!r} "
            "and others), of which the first is kept: how they make up the batch's value cannot be "
            "known. Return a tensor with one entry per sample, or a float or scalar tensor, which "
            "is averaged." + see("steps"),
            stacklevel=2,
        )
    return first


def _common_rule(scalars: Sequence[Scalar]) -> Rule | None:
    """The rule of scalars; a sum of nothing may be among means, or a mean of nothing among sums."""
    rules = [scalar.rule for scalar in scalars]
    return rules[0] if all(rule == rules[0] for rule in rules) else None


def _present(parts: Sequence[_Returned]) -> Sequence[_Returned]:
    """Those that returned something, with weights that add up to one again."""
    present = [part for part in parts if part.value is not None]
    if len(present) == len(parts):
        return parts
    total = sum(part.weight for part in present)
    return [part._replace(weight=part.weight / total) for part in present if total]


def _validate_kinds(outputs: Sequence[Any], path: str) -> None:
    kinds = {_kind(out) for out in outputs}
    if len(kinds) > 1:
        raise ValueError(
            f"The micro-batches of one batch returned different things in output{path}: "
            f"{' and '.join(sorted(kinds))}. A step (`training_step`, `validation_step`, ...) has "
            "to return the same structure for every part of a batch; keys of a dict may be missing."
            + see("steps")
        )


def _kind(out: Any) -> str:
    if is_array(out):
        return f"{type(out).__name__} {'with' if out.ndim else 'without'} dimensions"
    return "Tensor without dimensions" if isinstance(out, Scalar) else type(out).__name__


def _batch_dim(parts: Sequence[_Returned]) -> int:
    """The dimension that has an entry per sample, if one has; else the first."""
    shapes = [part.value.shape for part in parts]
    for dim in range(len(shapes[0])):
        if all(shape[dim] == part.size for shape, part in zip(shapes, parts, strict=True)):
            return dim
    return 0


def _is_joined(parts: Sequence[_Returned]) -> bool:
    """Whether lists are joined, rather than merged entry by entry."""
    first = parts[0].value
    if hasattr(first, "_fields"):
        return False
    held = [[leaf.shape[0] for _, leaf in arrays(part.value)] for part in parts]
    if all(len(part.value) == part.size for part in parts):
        return not all(
            lengths and all(length == part.size for length in lengths)
            for part, lengths in zip(parts, held, strict=True)
        )
    lengths = {len(part.value) for part in parts}
    return len(lengths) > 1 or (isinstance(first, list) and not any(_has_tensor(p) for p in first))


def _has_tensor(out: Any) -> bool:
    return is_array(out) or any(_has_tensor(child) for child in children(out).values())


def _merged_entries(parts: Sequence[_Returned], path: str) -> Any:
    each = [children(part.value) for part in parts]
    keys = dict.fromkeys(key for entries in each for key in entries)
    entries = {
        key: [part._replace(value=own.get(key)) for part, own in zip(parts, each, strict=True)]
        for key in keys
    }
    return rebuilt(
        parts[0].value,
        {key: _merged(values, path + key.text) for key, values in entries.items()},
    )
