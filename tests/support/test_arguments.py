"""Which values the arguments of every public name may have, and which not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_axosparse as package
from lightning_axosparse import (
    AxoSparseStrategy,
    ChannelTicket,
    EarlyBirdChannels,
    EarlyBirdTicket,
    ExpertParallel,
    GradualPruning,
    PipelineTimeline,
    TensorParallel,
    Ticket,
    densify,
    load_sparse,
    save_safetensors,
    sparsify,
)
from lightning_axosparse.callbacks.report.report import TrainingReport
from lightning_axosparse.examples.data import ImageDataModule, TextDataModule
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.examples.vgg import VGG
from lightning_axosparse.pruning.channels import Channels, Segment
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.support.arguments import (
    COUNT,
    FRACTION,
    NONE,
    TEXT,
    check,
    checked,
    list_of,
    short_repr,
)

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**30
NUMBERS = [True, NAN, INFINITE, -1, 1.5, "3", np.float32(2), torch.tensor(2), np.array([1, 2])]
OBJECTS = [[], {}, b"x", object(), torch.tensor([1, 2]), nn.Linear(2, 2)]
NO_COUNT = [*NUMBERS, *OBJECTS, 0, HUGE]
NO_INDEX = [*NUMBERS, *OBJECTS, None, HUGE]
NO_FRACTION = [None, True, NAN, -1, 2, "0.5", torch.tensor(0.5), *OBJECTS]
NO_WHEN = [True, NAN, INFINITE, -1, 0, 0.0, 1.5, "3", "0 epochs", "3 steps", "", *OBJECTS]
NO_RATE = [None, NAN, INFINITE, -1, "time"]
NO_WORD = [None, True, 1, "no such", "", np.array(["a", "b"]), *OBJECTS]
NO_BOOL = [None, 0, 1, "yes", np.array([True, False]), *OBJECTS]
NO_TEXT = [True, 1, 1.5, "", *OBJECTS]
NO_PATTERNS = [None, True, 1, "head.*", b"x", {"a": 1}, [1], [None], [""], object()]
NO_OBJECT = [True, 1, "x", [], object()]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


MASKS = {"0.weight": torch.arange(24).reshape(4, 6) % 3 == 0}


def sparsified(module: Any = None, masks: Any = MASKS, **others: Any) -> None:
    sparsify(model() if module is None else module, masks, **others)


def densified(module: Any = None, optimizer: Any = None) -> None:
    densify(model() if module is None else module, optimizer)


def saved(module: Any = None, path: Any = os.devnull, sparse: Any = True) -> None:
    save_safetensors(model() if module is None else module, path, sparse)


def loaded(module: Any = None, source: Any = None, ticket: Any = None, skip: Any = ()) -> None:
    source = model().state_dict() if source is None else source
    ticket = Ticket(MASKS, 0.5) if ticket is None else ticket
    load_sparse(model() if module is None else module, source, ticket, skip)


def gpt(**others: Any) -> GPT:
    return GPT(**{"width": 8, "depth": 1, "heads": 2, "context": 4, **others})


def ticket(masks: Any = MASKS, pruning_ratio: Any = 0.5, **others: Any) -> Ticket:
    return Ticket(masks, pruning_ratio, **others)


CHANNELS = Channels({"1": 4}, {"0": "1", "1": "1"}, {"2": [Segment("1", 4)]})


def channel_ticket(masks: Any = None, channels: Any = CHANNELS, **others: Any) -> ChannelTicket:
    masks = {"1": torch.arange(4) % 2 == 0} if masks is None else masks
    return ChannelTicket(masks, channels=channels, **{"pruning_ratio": 0.5, **others})


def shrunk(module: Any = None, optimizers: Any = ()) -> None:
    layers = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)
    channel_ticket().apply(nn.Sequential(*layers) if module is None else module, optimizers)


def largest(**others: Any) -> ChannelTicket:
    layers = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)
    return ChannelTicket.largest(
        **{"module": nn.Sequential(*layers), "pruning_ratio": 0.5, **others}
    )


def generated_tokens(**others: Any) -> torch.Tensor:
    return gpt().generate_tokens(**{"tokens": torch.tensor([[1]]), "n": 1, **others})


def generated(**others: Any) -> str:
    return gpt().generate(**{"prompt": "a", "n": 1, **others})


PRUNING: dict[str, list[Any]] = {
    "score": [None, True, 1, "lamp", "", []],
    "floor": NO_FRACTION,
    "which": [True, 1, "head.*", ["head.*"], {"head": 1}, {"head": None}, {1: True}],
    "ticket": NO_TEXT,
    "compute": NO_WORD,
}
"""Of what prunes weights."""

INVALID: list[tuple[Callable[..., Any], type[Exception], dict[str, list[Any]]]] = [
    (
        AxoSparseStrategy,
        MisconfigurationException,
        {
            "g_inter": [None, "many", *NO_COUNT],
            "microbatches": NO_COUNT,
            "pipeline": NO_TEXT,
            "balance": [None, True, 3, "size", [], {}, [1.5], [0, 2], [True], {3, 5}, b"x"],
            "in_flight": NO_COUNT,
            "schedule": NO_WORD,
            "transport": NO_WORD,
            "split_batch": [True, 1, "x", [], {}],
            "loss": [value for value in NO_WORD if not callable(value)],
            "save_distributed_checkpoint": NO_BOOL,
            "timeout": [None, True, 0, -1, "30", [], float("nan"), timedelta(0)],
            "recompute": ["cube", *NO_COUNT],
            "shard_optimizer": NO_BOOL,
            "regrid": ["some", *NO_COUNT],
            "tensor_parallel": [*NO_COUNT, ExpertParallel(2)],
            "expert_parallel": [*NO_COUNT, TensorParallel(2)],
            "accelerator": NO_OBJECT,
            "cluster_environment": NO_OBJECT,
            "checkpoint_io": NO_OBJECT,
            "parallel_devices": [True, 1, "x", object()],
            "precision_plugin": NO_OBJECT,
        },
    ),
    (
        EarlyBirdTicket,
        MisconfigurationException,
        {
            "pruning_ratio": [0, 0.0, 1, 1.0, *NO_FRACTION],
            "distance": NO_WORD,
            "threshold": [0, *NO_FRACTION],
            "window": [None, 1, *NO_COUNT],
            "every": [None, *NO_WHEN],
            "draw_by": NO_WHEN,
            **PRUNING,
        },
    ),
    (
        GradualPruning,
        MisconfigurationException,
        {
            "pruning_ratio": [0, 0.0, 1, 1.0, *NO_FRACTION],
            "start": [None, "1 epoch", *NO_WHEN],
            "end": [None, "1 epoch", *NO_WHEN],
            "every": [None, "1 epoch", *NO_WHEN],
            **PRUNING,
        },
    ),
    (
        EarlyBirdChannels,
        MisconfigurationException,
        {
            "pruning_ratio": [0, 0.0, 1, 1.0, *NO_FRACTION],
            "slimming": [True, *NO_RATE, *OBJECTS],
            "floor": NO_FRACTION,
            "network": NO_TEXT,
            "every": [None, *NO_WHEN],
            "draw_by": NO_WHEN,
            "distance": NO_WORD,
            "threshold": [0, *NO_FRACTION],
            "window": [None, 1, *NO_COUNT],
            "ticket": NO_TEXT,
        },
    ),
    (
        channel_ticket,
        ValueError,
        {
            "masks": [1, [], MASKS["0.weight"], "x"],
            "channels": [None, {}, "x"],
            "pruning_ratio": NO_FRACTION,
            "step": NO_INDEX[:-2],
            "distances": [None, 0.5, [0.5], {1: NAN}, {1.5: 0.5}, {-1: 0.5}, {1: "x"}, "x"],
        },
    ),
    (ChannelTicket.load, ValueError, {"path": [None, *NO_TEXT]}),
    (channel_ticket().save, ValueError, {"path": [None, *NO_TEXT]}),
    (shrunk, ValueError, {"module": [1, "x", []], "optimizers": [None, 1, "x", [1]]}),
    (
        largest,
        ValueError,
        {
            "module": [1, "x", []],
            "pruning_ratio": [0, 1, *NO_FRACTION],
            "floor": NO_FRACTION,
            "network": NO_TEXT,
        },
    ),
    (
        PipelineTimeline,
        MisconfigurationException,
        {"batch_idx": NO_INDEX, "epoch": NO_INDEX[:-2], "folder": NO_TEXT},
    ),
    (
        TrainingReport,
        MisconfigurationException,
        {
            "folder": NO_TEXT,
            "val_loss": [None, *NO_TEXT],
            "test_loss": [None, *NO_TEXT],
            "val_accuracy": NO_TEXT,
            "test_accuracy": NO_TEXT,
        },
    ),
    (
        ticket,
        ValueError,
        {
            "masks": [None, [], MASKS["0.weight"], "x"],
            "pruning_ratio": NO_FRACTION,
            "score": [True, 1, "", []],
            "step": NO_INDEX[:-2],
            "distance": NO_WORD,
            "distances": [None, 0.5, [0.5], {1: NAN}, {1.5: 0.5}, {-1: 0.5}, {1: "x"}, "x"],
        },
    ),
    (Ticket.load, ValueError, {"path": [None, *NO_TEXT]}),
    (ticket().save, ValueError, {"path": [None, *NO_TEXT]}),
    (
        sparsified,
        ValueError,
        {
            "module": [1, "x", [], {}],
            "masks": [None, [], MASKS["0.weight"], "x"],
            "optimizer": [[torch.optim.SGD(model().parameters(), 0.1)], 1, "x"],
            "compute": NO_WORD,
        },
    ),
    (densified, ValueError, {"module": [1, "x", []], "optimizer": [[], 1, "x"]}),
    (saved, ValueError, {"module": [1, "x", {}], "path": [None, *NO_TEXT], "sparse": NO_BOOL}),
    (
        loaded,
        ValueError,
        {
            "module": [1, "x", {}],
            "source": [1, True, [], "", b"x"],
            "ticket": [True, 1, "", MASKS],
            "skip": NO_PATTERNS,
        },
    ),
    (
        gpt,
        ValueError,
        {
            **dict.fromkeys(["width", "depth", "heads", "context", "vocabulary"], NO_COUNT),
            **dict.fromkeys(["dropout", "warmup"], NO_FRACTION),
            **dict.fromkeys(["learning_rate", "weight_decay"], NO_RATE),
        },
    ),
    (
        generated_tokens,
        ValueError,
        {
            "tokens": [
                *[None, 1, [[1]], "a"],
                *[torch.tensor([1]), torch.tensor([[1.0]]), torch.ones(2, 0, dtype=torch.int64)],
            ]
        },
    ),
    (
        generated,
        ValueError,
        {
            "prompt": [None, *NO_TEXT],
            "n": NO_INDEX,
            "temperature": [None, NAN, -1, "x"],
            "seed": [True, -1, 1.5, "x", 2**64],
        },
    ),
    (
        VGG,
        ValueError,
        {
            "blocks": [None, True, 1, [1], [[]], [[0]], [["a"]], "x"],
            "image_channels": [None, *NO_COUNT],
            "classes": [None, *NO_COUNT],
            **dict.fromkeys(["learning_rate", "weight_decay"], NO_RATE),
            "momentum": NO_FRACTION,
        },
    ),
    (
        ImageDataModule,
        MisconfigurationException,
        {
            "batch_size": [None, *NO_COUNT],
            "held_out": [0, 0.5, *NO_FRACTION],
            "seed": [None, True, -1, 1.5, "x", 2**32],
            "num_workers": NO_INDEX,
        },
    ),
    (
        TextDataModule,
        MisconfigurationException,
        {
            "path": NO_TEXT,
            "context": [None, *NO_COUNT],
            "batch_size": [None, *NO_COUNT],
            "held_out": [0, 0.5, *NO_FRACTION],
            "max_held_out": NO_COUNT,
            "max_bytes": NO_COUNT,
            "seed": [None, True, -1, 1.5, "x", 2**32],
            "num_workers": NO_INDEX,
        },
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "name", "values"),
    [
        pytest.param(make, error, name, values, id=f"{make.__qualname__}-{name}")
        for make, error, arguments in INVALID
        for name, values in arguments.items()
    ],
)
def test_the_error_names_the_argument_and_its_value(
    make: Callable[..., Any], error: type[Exception], name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(error) as raised:
            make(**{name: value})
        assert str(raised.value).startswith(f"{name}={short_repr(value)} must be ")
        assert type(raised.value) is error


def test_every_public_name_is_among_them() -> None:
    assert len(INVALID) >= len(set(package.__all__))


@pytest.mark.parametrize(
    "make",
    [
        AxoSparseStrategy,
        EarlyBirdChannels,
        EarlyBirdTicket,
        GradualPruning,
        PipelineTimeline,
    ],
)
def test_every_argument_is_among_them(make: Any) -> None:
    arguments = next(arguments for each, _, arguments in INVALID if each is make)
    annotations = {*make.__init__.__annotations__} - {"return"}
    assert {*arguments} == annotations


def test_the_strategy_shows_its_arguments() -> None:
    parameters = signature(AxoSparseStrategy).parameters
    assert {*parameters} == {field.name for field in fields(Config)}
    assert parameters["g_inter"].default == 1
    assert parameters["accelerator"].kind is Parameter.KEYWORD_ONLY
    assert sum(not field.kw_only for field in fields(Config)) <= 18
    documented = re.findall(r"^        (\w+): ", AxoSparseStrategy.__doc__ or "", re.MULTILINE)
    assert [name for name in documented if name in parameters] == [*parameters]
    with pytest.raises(TypeError, match="no argument 'stages'"):
        AxoSparseStrategy(stages=2)  # type: ignore[call-arg]


def test_what_fits_is_taken_with_numpys_numbers_as_pythons(tmp_path: Path) -> None:
    strategy = AxoSparseStrategy(
        np.int64(4),
        np.int32(3),
        balance=np.array([1, 2, 3, 1]),
        regrid=np.int8(2),
        recompute=np.uint8(2),
        shard_optimizer=np.bool_(True),
        split_batch=lambda batch, parts: [batch] * parts,
    )
    assert (type(strategy.g_inter), strategy.microbatches) == (int, 3)
    callback = EarlyBirdTicket(
        np.float32(0.8),
        threshold=np.float64(0.1),
        window=np.int64(2),
        every=np.float64(0.25),
        draw_by=np.float32(0.5),
    )
    assert callback.pruning_ratio == pytest.approx(0.8)
    EarlyBirdTicket(pruning_ratio=np.float64(0.5), threshold=1, which={"a": np.bool_(False)})
    assert PipelineTimeline(np.int64(2), folder=tmp_path).folder == tmp_path
    kept = Ticket(
        MASKS, np.float64(0.5), step=np.int64(1), distances={np.int64(1): np.float32(0.25)}
    )
    assert Ticket.from_state_dict(kept.state_dict()) == kept
    assert kept.distances == {1: 0.25}


def test_numbers_of_any_size_are_taken_at_once() -> None:
    for value in (10**9, 2**31 - 1):
        counts = dict.fromkeys(("g_inter", "microbatches", "in_flight", "recompute"), value)
        AxoSparseStrategy(loss="mean", **counts)
        EarlyBirdTicket(window=value, every=value, draw_by=value)
        GradualPruning(start=value - 1, end=value, every=value)
    with pytest.raises(MisconfigurationException, match=r"regrid=7 .*g_inter=1000000000"):
        AxoSparseStrategy(g_inter=10**9, regrid=7)


def test_balance_is_of_as_many_stages_as_there_are() -> None:
    with pytest.raises(MisconfigurationException, match=r"balance=\[2, 2\].*2 stages.*g_inter=3"):
        AxoSparseStrategy(g_inter=3, balance=(2, 2))


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()))
def test_a_kind_tells_of_any_value_whether_it_fits(value: Any) -> None:
    kinds = {"count": COUNT | NONE, "share": FRACTION, "patterns": list_of("patterns", TEXT)}
    count = value is None or (type(value) is int and 1 <= value < 2**31)
    share = type(value) in (int, float) and 0 <= value <= 1
    for name, fits in {"count": count, "share": share, "patterns": False}.items():
        if fits:
            assert check(ValueError, {name: value}, kinds) == {name: value}
        else:
            with pytest.raises(ValueError, match=f"{name}=.* must be"):
                check(ValueError, {name: value}, kinds)


def test_long_values_are_shortened() -> None:
    text = short_repr(torch.arange(10_000.0))
    assert len(text) == 80
    assert text.endswith("...")
    assert "\n" not in short_repr(nn.Sequential(nn.Linear(2, 2)))


def test_a_checked_function_keeps_its_signature_and_its_defaults() -> None:
    @checked(ValueError, count=COUNT)
    def doubled(count: int = 0) -> int:
        return 2 * count

    assert (doubled(), doubled(3), doubled(count=np.int64(4))) == (0, 6, 8)
    assert doubled.__name__ == "doubled"
    with pytest.raises(TypeError, match="unexpected keyword"):
        doubled(counts=3)  # type: ignore[call-arg]
