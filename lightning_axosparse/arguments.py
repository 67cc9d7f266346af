"""Arguments: what AxoSparseStrategy cannot be told, or not together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.pipeline.schedule import SCHEDULES


def is_count(value: object) -> bool:
    """Whether ``value`` is a whole number, at least 1; a bool says yes or no, not how many."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return bool(value >= 1)


def seconds(timeout: object) -> float:
    """The seconds of ``timeout``.

    Raises:
        MisconfigurationException: if it is no time, or none at all.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        value = math.nan
    if not value > 0:
        raise MisconfigurationException(
            f"timeout={timeout!r} must be a number of seconds above 0, or a datetime.timedelta."
        )
    return float(value)


def refuse_arguments(
    g_inter: int | Literal["auto"],
    microbatches: int | None,
    in_flight: int | None,
    schedule: str,
    transport: str,
    recompute: int | Literal["sqrt"] | None,
    balance: str | Sequence[int],
    offload_bucket: int,
) -> None:
    """Refuse arguments out of range, and those that contradict each other.

    Raises:
        MisconfigurationException: with the value, and what to give instead.
    """
    _refuse_stages(g_inter, transport, balance)
    for name, value, otherwise in (
        ("microbatches", microbatches, ", or None"),
        ("in_flight", in_flight, ", or None"),
        ("offload_bucket", offload_bucket, ""),
    ):
        if not (is_count(value) or (otherwise and value is None)):
            raise MisconfigurationException(
                f"{name}={value!r} must be a whole number, at least 1{otherwise}."
            )
    if recompute not in (None, "sqrt") and not is_count(recompute):
        raise MisconfigurationException(
            f"recompute={recompute!r} must be 'sqrt', or the number, at least 1, of layers that "
            "keep one input together."
        )
    if isinstance(balance, str) and balance not in ("parameters", "time"):
        raise MisconfigurationException(
            f"balance={balance!r} is not known. Choose 'parameters', 'time', or the number of "
            "layers of each stage."
        )
    if schedule not in SCHEDULES:
        raise MisconfigurationException(
            f"schedule={schedule!r} is not known. Choose from {list(SCHEDULES)}."
        )
    if transport not in ("mpi", "loopback"):
        raise MisconfigurationException(
            f"transport={transport!r} is not known. Choose 'mpi', where each stage is a rank, or "
            "'loopback', where all stages of a replica share one process."
        )
    if in_flight is not None and schedule != "message-driven":
        raise MisconfigurationException(
            f"in_flight={in_flight} belongs to schedule='message-driven'; {schedule!r} has its own "
            "fixed limit. Leave one of them out."
        )


def _refuse_stages(
    g_inter: int | Literal["auto"], transport: str, balance: str | Sequence[int]
) -> None:
    """Refuse a number of stages that is none, or that is left open where it cannot be."""
    if g_inter == "auto" and transport == "loopback":
        raise MisconfigurationException(
            "g_inter='auto' divides the ranks that there are into stages and replicas, but with "
            "transport='loopback' all stages share one. Give g_inter a number."
        )
    if g_inter == "auto" and not isinstance(balance, str):
        raise MisconfigurationException(
            f"balance={list(balance)} gives the layers of {len(balance)} stages: say "
            f"g_inter={len(balance)} instead of 'auto', or leave balance out."
        )
    if g_inter != "auto" and not is_count(g_inter):
        raise MisconfigurationException(
            f"g_inter={g_inter!r} must be a number of stages, at least 1, or 'auto'."
        )
