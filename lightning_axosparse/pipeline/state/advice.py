"""Says what a step changes on a module that does not become what one process would have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_axosparse.pipeline.state.module_state import Place
from lightning_axosparse.pipeline.state.rules import Seen
from lightning_axosparse.pipeline.state.values import MISSING
from lightning_axosparse.support.troubleshooting import see

_HOOKS = (
    "Change it in a hook such as `on_train_batch_end`, which runs once a batch, or use a "
    "torchmetric; AxoSparseStrategy(microbatches=1) is exact."
)


def unexplained(place: Place, path: str, seen: Seen) -> str:
    """What to say of an attribute of which micro-batches make something else than the batch.

    Args:
        place: the attribute.
        path: of the entry of it that differs.
        seen: what the runs have made of that.
    """
    parts = ", ".join(map(_brief, seen.parts))
    return (
        f"The step changes `{place}{path}` from {_brief(seen.before)} to {_brief(seen.whole)} with "
        f"the whole batch, and its micro-batches change it to {parts}: no sum, mean or "
        "concatenation of these is what one process would have, so one micro-batch after the "
        f"other changes it, and a loss that reads it is another one. {_HOOKS}" + see("steps")
    )


def trained(place: Place) -> str:
    """What to say of a parameter that is trained, and that a step changes in each run again."""
    return (
        f"The step changes the values of `{place}`, which is trained, in every micro-batch again. "
        "Change them once a batch, in `on_before_zero_grad` or `on_train_batch_end`; "
        "AxoSparseStrategy(microbatches=1) is exact." + see("steps")
    )


def not_sent(place: Place) -> str:
    """What to say of an attribute that is too large to be sent to the other stages."""
    return (
        f"The step changes `{place}`, but a rank runs the step only as far as the layers of its "
        "stage, and what is new is larger than 1 MB, or an object that cannot be sent: before the "
        "last stage hooks find what was made there. Log values or torchmetrics objects, which "
        "every rank receives, or take what the step returns in a hook such as "
        "`on_train_batch_end`, with AxoSparseStrategy(step_outputs='all')." + see("steps")
    )


def not_alike(place: Place, parts: Sequence[Any]) -> str:
    """What to say of an attribute that micro-batches change otherwise than in the first batch."""
    return (
        f"The step changes `{place}` in other ways than in its first batch: the micro-batches of "
        f"this one make {', '.join(map(_brief, parts))} of it, of which the last is kept. {_HOOKS}"
        + see("steps")
    )


def _brief(value: Any) -> str:
    """A number itself; of anything else what it is."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            return f"{type(value).__name__.lower()} of shape {tuple(value.shape)}"
        value = value.item()
    if isinstance(value, (int, float)):
        return f"{value:.6g}"
    name = "None" if value is None else type(value).__name__
    return f"{name} of {len(value)} entries" if hasattr(value, "__len__") else name
